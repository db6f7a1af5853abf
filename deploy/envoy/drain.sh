#!/bin/bash
# Run before Envoy is stopped: it takes no new connections, lets answers finish, and returns. Argument: seconds at most.
# Needs only bash and sed; the admin interface listens on loopback (TANDEM_ENVOY_ADMIN_PORT, 9901).
set -u
limit=${1:-300}
port=${TANDEM_ENVOY_ADMIN_PORT:-9901}

admin() {
    exec 3<>"/dev/tcp/127.0.0.1/$port" || return 1
    printf '%s HTTP/1.1\r\nhost: admin\r\ncontent-length: 0\r\nconnection: close\r\n\r\n' "$1" >&3
    cat <&3
    exec 3<&-
}

# Readiness probes and load balancers see it, and HTTP/1.1 and HTTP/2 clients are told to connect elsewhere.
admin 'POST /healthcheck/fail' >/dev/null || exit 0
admin 'POST /drain_listeners?graceful&skip_exit' >/dev/null
# Whoever balances has to notice first; only then does a count of nothing mean anything.
for ((second = 0; second < limit; second++)); do
    sleep 1
    active=$(admin 'GET /stats?filter=^http\.openai\.downstream_rq_active$&format=text' | sed -n 's/^http\.openai\.downstream_rq_active: \([0-9]*\).*/\1/p')
    if ((second >= ${TANDEM_ENVOY_DRAIN_SECONDS:-5})) && [ "${active:-0}" = 0 ]; then
        exit 0
    fi
done
