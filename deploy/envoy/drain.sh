#!/bin/bash
# Before the edge's Envoy ends: takes no new connections, asks clients to leave the old ones, and waits for what runs.
# SIGTERM alone would cut every stream. A preStop hook in the image envoyproxy/envoy, which has bash and no curl.
#
#     drain.sh [ADMIN of Envoy: 127.0.0.1:9901] [SECONDS to wait at most: 600] [at least, --drain-time-s and a bit: 6]
#
# At least, since clients still come until all have heard that this one is going, and an idle Envoy would not be there.
set -euo pipefail
admin=${1:-127.0.0.1:9901} longest=${2:-600} shortest=${3:-6}

ask() { # METHOD PATH
    exec 3<>"/dev/tcp/${admin%:*}/${admin##*:}"
    printf '%s %s HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
    cat <&3
    exec 3>&-
}

is_busy() { # no pipe to grep -q, which would break it when it has seen enough
    [[ $(ask GET '/stats?filter=^http.edge.downstream_rq_active$') == *'rq_active: '[1-9]* ]]
}

ask POST '/drain_listeners?graceful' > /dev/null
while ((SECONDS < shortest)) || is_busy; do
    ((SECONDS < longest)) || exit 1
    sleep 0.2
done
