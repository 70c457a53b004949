#!/bin/bash
# Before the edge's Envoy ends: takes no new connections, asks clients to leave the old ones, and waits for what runs.
# SIGTERM alone would cut every stream. A preStop hook in the image envoyproxy/envoy, which has bash and no curl.
#
#     drain.sh [ADMIN of Envoy: 127.0.0.1:9901] [SECONDS to wait at most: 600]
set -euo pipefail
admin=${1:-127.0.0.1:9901} longest=${2:-600}

ask() { # METHOD PATH
    exec 3<>"/dev/tcp/${admin%:*}/${admin##*:}"
    printf '%s %s HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
    cat <&3
    exec 3>&-
}

ask POST '/drain_listeners?graceful' > /dev/null
while ask GET '/stats?filter=^http.edge.downstream_rq_active$' | grep -q 'rq_active: [1-9]'; do
    ((SECONDS < longest)) || exit 1
    sleep 0.2
done
