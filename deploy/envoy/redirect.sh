#!/bin/sh
# Lets sidecar-mtls.yaml stand on both ways of the service in this network namespace: what comes for its ports, and what
# it sends to other services' gRPC port. Once, before both start, with NET_ADMIN: an init container of the pod.
#
#     redirect.sh [gRPC PORT of all services: 50051] [HTTP PORT of routers: 8080] [GROUP that Envoy alone runs as: 1337]
set -eu
port=${1:-50051} http_port=${2:-8080} group=${3:-1337}
iptables -t nat -A PREROUTING -p tcp --dport "$port" -j REDIRECT --to-ports 15006
iptables -t nat -A PREROUTING -p tcp --dport "$http_port" -j REDIRECT --to-ports 15007
iptables -t nat -A OUTPUT -p tcp --dport "$port" ! -d 127.0.0.0/8 -m owner ! --gid-owner "$group" \
    -j REDIRECT --to-ports 15001
