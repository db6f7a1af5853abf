#!/usr/bin/env bash
# Measures a release build end to end on this machine: simulated engines, one replica, Envoy with the shipped file.
#
#   bench/run.sh                 everything
#   bench/run.sh requests        one of: requests chunks memory pods replicas
#
# Envoy is found as by the tests: TANDEM_TEST_ENVOY, what scripts/test.sh fetched, or PATH. Ports from BENCH_PORT (18000)
# upwards are used. BENCH_LOAD names a load generator that is built already. Each result is one JSON line that names its units.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo build --release --quiet
load=${BENCH_LOAD:-}
[ -n "$load" ] || load=$(cargo bench --bench load --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"name":"load".*"executable":"\([^"]*\)".*/\1/p' | tail -1)
tandem=${CARGO_TARGET_DIR:-target}/release/tandem
envoy=${TANDEM_TEST_ENVOY:-target/tools/venv/bin/envoy}
[ -x "$envoy" ] || envoy=$(command -v envoy)

port=${BENCH_PORT:-18000}
listener=$port admin=$((port + 1)) grpc=$((port + 2)) http=$((port + 3)) front=$((port + 4))
prefill=$((port + 10)) decode=$((port + 11)) combined=$((port + 12)) timed=$((port + 20))

directory=$(mktemp -d)
started=()
stop() {
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    started=()
}
trap 'stop; rm -rf "$directory"' EXIT

# start NAME COMMAND...: in the background, with its output in a file; sets NAME_pid.
start() {
    local name=$1
    shift
    "$@" >"$directory/$name.log" 2>&1 &
    started+=($!)
    printf -v "${name}_pid" '%s' $!
}

await() { # URL
    for _ in $(seq 300); do
        curl --silent --fail --output /dev/null "$1" && return
        sleep 0.1
    done
    echo "no answer from $1; logs:" >&2
    tail -n 5 "$directory"/*.log >&2
    exit 1
}

pod() { # NAME MODEL PORT ROLE-LABELS
    cat <<POD
---
apiVersion: v1
kind: Pod
metadata:
  name: $1
  labels: {model.aibrix.ai/name: $2, model.aibrix.ai/port: "$3"$4}
status: {podIP: 127.0.0.1}
POD
}

pair() { # MODEL PREFILL-PORT DECODE-PORT
    pod "$1-prefill" "$1" "$2" ", role-name: prefill, roleset-name: $1"
    pod "$1-decode" "$1" "$3" ", role-name: decode, roleset-name: $1"
}

# system [SED-EXPRESSION]: starts everything; the expression changes Envoy's file.
system() {
    { pair bench $prefill $decode; pod plain plain $combined ""; pair timed $timed $timed; } >"$directory/pods.yaml"
    sed -e "s/address: 127.0.0.1, port_value: 9901/address: 127.0.0.1, port_value: $admin/" \
        -e "s/address: 0.0.0.0, port_value: 10000/address: 127.0.0.1, port_value: $listener/" \
        -e "s/address: tandem, port_value: 50052/address: 127.0.0.1, port_value: $grpc/" \
        -e "s/address: tandem, port_value: 8080/address: 127.0.0.1, port_value: $http/" \
        -e "${1:-}" deploy/envoy/envoy.yaml >"$directory/envoy.yaml"
    start sim_prefill $tandem sim --instant --role prefill --model bench --port $prefill
    start sim_decode $tandem sim --instant --role decode --model bench --port $decode
    start sim_combined $tandem sim --instant --role combined --model plain --port $combined
    start tandem $tandem serve --pods "$directory/pods.yaml" --grpc-bind-address 127.0.0.1:$grpc \
        --http-bind-address 127.0.0.1:$http --front-bind-address 127.0.0.1:$front
    start envoy "$envoy" -c "$directory/envoy.yaml" --use-dynamic-base-id --concurrency 2 --log-level error
    await http://127.0.0.1:$http/readyz
    await http://127.0.0.1:$listener/v1/models
    watch=(--watch "tandem=$tandem_pid" --watch "envoy=$envoy_pid")
}

measure() { # LABEL ARGUMENTS...
    printf '%-44s' "$1"
    "$load" "${@:2}"
}

through_envoy=http://127.0.0.1:$listener through_front=http://127.0.0.1:$front

requests() {
    system
    local plain=(--model plain --strategy least-request) pd=(--model bench --strategy pd)
    echo "== latency, 100 requests per second, 1 kB, 16 streamed tokens"
    measure "engine alone" requests --rate 100 --url http://127.0.0.1:$combined --model plain
    measure "front, one pod" requests --rate 100 --url $through_front "${plain[@]}" "${watch[@]}"
    measure "Envoy, one pod" requests --rate 100 --url $through_envoy "${plain[@]}" "${watch[@]}"
    measure "front, prefill and decode pod" requests --rate 100 --url $through_front "${pd[@]}" "${watch[@]}"
    measure "Envoy, prefill and decode pod" requests --rate 100 --url $through_envoy "${pd[@]}" "${watch[@]}"
    echo "== throughput, 32 at a time, 1 kB, 16 streamed tokens"
    measure "front, prefill and decode pod" requests --url $through_front "${pd[@]}" "${watch[@]}"
    measure "Envoy, prefill and decode pod" requests --url $through_envoy "${pd[@]}" "${watch[@]}"
    echo "== throughput, 32 at a time, 100 kB, 1 streamed token"
    measure "front, prefill and decode pod" requests --body-bytes 100000 --tokens 1 --url $through_front "${pd[@]}" "${watch[@]}"
    measure "Envoy, prefill and decode pod" requests --body-bytes 100000 --tokens 1 --url $through_envoy "${pd[@]}" "${watch[@]}"
    stop
}

chunks() {
    local run=(chunks --engine-port $timed --model timed --strategy pd)
    for mode in STREAMED NONE; do
        system "s/response_body_mode: STREAMED/response_body_mode: $mode/"
        echo "== chunks, response_body_mode $mode"
        for load_point in "100 10" "400 10" "200 50"; do
            read -r streams per_second <<<"$load_point"
            local point=(--streams "$streams" --per-second "$per_second")
            if [ $mode = STREAMED ]; then
                measure "engine alone, $streams x $per_second/s" "${run[@]}" "${point[@]}" --url http://127.0.0.1:$timed
                measure "front, $streams x $per_second/s" "${run[@]}" "${point[@]}" --url $through_front "${watch[@]}"
            fi
            measure "Envoy, $streams x $per_second/s" "${run[@]}" "${point[@]}" --url $through_envoy "${watch[@]}"
        done
        stop
    done
}

memory() {
    for way in "$through_envoy" "$through_front"; do
        system
        echo "== memory, $way"
        measure "2,000 open streams" open --engine-port $timed --model timed --strategy pd --streams 2000 \
            --url "$way" "${watch[@]}"
        stop
    done
}

# serve NAME HTTP-PORT FRONT-PORT [VARIABLE=VALUE...]: a replica on the pods of $directory/pods.yaml.
serve() {
    start "$1" env POD_NAME="$1" "${@:4}" "$tandem" serve --pods "$directory/pods.yaml" \
        --grpc-bind-address 127.0.0.1:0 --http-bind-address "127.0.0.1:$2" --front-bind-address "127.0.0.1:$3"
    await "http://127.0.0.1:$2/readyz"
}

# engines COUNT: that many pods in rolesets of two and two. All of them are two engines that listen on every address.
engines() {
    start sim_prefill "$tandem" sim --instant --role prefill --model bench --bind 0.0.0.0 --port $prefill
    start sim_decode "$tandem" sim --instant --role decode --model bench --bind 0.0.0.0 --port $decode
    local number
    for number in $(seq 0 $(($1 - 1))); do
        local role=prefill to=$prefill
        if [ $((number % 2)) = 1 ]; then role=decode to=$decode; fi
        pod "pod-$number" bench "$to" ", role-name: $role, roleset-name: set-$((number / 4))" |
            sed "s/podIP: .*/podIP: 127.0.$((1 + number / 200)).$((1 + number % 200))}/"
    done >"$directory/pods.yaml"
}

pods() {
    for count in ${PODS:-4 100 400}; do
        engines $count
        serve tandem $http $front
        echo "== $count pods, metrics every 50 ms"
        measure "no request" idle --watch "tandem=$tandem_pid"
        measure "front, 200 requests per second" requests --rate 200 --url $through_front --strategy pd \
            --watch "tandem=$tandem_pid"
        stop
        engines $count
        serve tandem $http $front AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS=1000
        echo "== $count pods, metrics every second"
        measure "no request" idle --watch "tandem=$tandem_pid"
        measure "front, 200 requests per second" requests --rate 200 --url $through_front --strategy pd \
            --watch "tandem=$tandem_pid"
        stop
    done
}

replicas() {
    local redis_server=${TANDEM_TEST_REDIS:-$(command -v redis-server)}
    for count in 1 2 4 8; do
        engines 16
        start redis "$redis_server" --port $((port + 30)) --bind 127.0.0.1 --save '' --appendonly no
        local all=() urls=() number
        for number in $(seq $count); do
            local name=replica_$number at=$((port + 40 + 2 * number))
            serve "$name" $at $((at + 1)) REDIS_URL=redis://127.0.0.1:$((port + 30)) AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS=1000
            local pid=${name}_pid
            all+=(--watch "$name=${!pid}")
            urls+=("http://127.0.0.1:$((at + 1))")
        done
        echo "== $count replicas, 16 pods, Redis"
        measure "no request" idle "${all[@]}" --watch "redis=$redis_pid"
        measure "200 requests per second in all" requests --rate 200 --strategy pd \
            --url "$(IFS=,; echo "${urls[*]}")" "${all[@]}" --watch "redis=$redis_pid"
        stop
    done
}

echo "$(nproc) cores, $(uname -sm), load $(cut -d' ' -f1 /proc/loadavg), revision $(git rev-parse --short HEAD)"
if [ $# -gt 0 ]; then "$1"; else requests; chunks; memory; pods; replicas; fi
