#!/usr/bin/env bash
# Real SGLang servers on a CPU: a prefill and a decode server that move KV with Mooncake over TCP, and a plain one.
#
#   tests/real/sglang.sh setup [DIRECTORY]   installs SGLang and makes the tiny model; does nothing when that is done
#   tests/real/sglang.sh start [DIRECTORY]   starts the servers that do not run and prints where they are, as JSON
#   tests/real/sglang.sh stop  [DIRECTORY]   stops them
#
# DIRECTORY is else $TANDEM_REAL_DIR, else target/real. A further variable, for `start`:
#   TANDEM_REAL_START_SECONDS   how long a server may take to start (default 900)
#
# SGLang does not support such machines. Three things make it work all the same: a stand-in for its kernel package
# (tests/real/stand_ins), one line of its source changed at set-up, and flags by which it takes no GPU path.
# x86-64 with AVX2, Python 3.11 or newer, PyPI, 10 GB of disk, 8 GB of memory. docs/real-engines.md says more.
set -euo pipefail

SGLANG=0.5.23
MOONCAKE=0.3.13.post1

engine=sglang
command=${1:-}
shift || true
# shellcheck source=tests/real/servers.sh
. "$(dirname "$0")/servers.sh"

setup() {
    local pins="sglang $SGLANG, mooncake-transfer-engine-non-cuda $MOONCAKE"
    if [ "$(cat "$venv/installed" 2>/dev/null)" != "$pins" ]; then
        say "$pins into $venv"
        make_venv
        "$venv/bin/uv" pip install --quiet --no-cache --python "$venv/bin/python" \
            "sglang==$SGLANG" "mooncake-transfer-engine-non-cuda==$MOONCAKE"
        keep_indices_on_the_host
        say "bytecode"
        # Some packages ship files for other versions of Python, which do not compile: that is all right.
        "$venv/bin/python" -m compileall -q -j "$(nproc)" "$(site_packages)" >/dev/null 2>&1 || true
        printf '%s\n' "$pins" >"$venv/installed"
    fi
    install_libraries
    # Not from where they are: Python writes its bytecode beside them.
    cp -r "$here/stand_ins" "$home/"
    make_model
    say "ready in $home"
}

# The prefill server copies page indices through pinned memory and waits for a CUDA event, also where there is no CUDA.
# The branch beside it works without: it is to be taken here.
keep_indices_on_the_host() {
    "$venv/bin/python" - "$(site_packages)/sglang/srt/disaggregation/prefill.py" <<'PY'
import pathlib, sys
file = pathlib.Path(sys.argv[1])
text = file.read_text()
condition = 'if getattr(sender, "supports_host_tensor_indices", False)'
guarded = condition.replace("if ", "if torch.cuda.is_available() and ", 1)
if guarded not in text:
    if text.count(condition) != 1:
        sys.exit(f"{file}: the line to change is not there")
    file.write_text(text.replace(condition, guarded))
PY
}

# What Mooncake links to.
install_libraries() {
    local missing=() library package
    for library in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1; do
        package=${library#*:}
        ldconfig -p | grep -q "${library%:*}" || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "apt-get install ${missing[*]}"
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    "${as_root[@]}" apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

# Starts server $1 with the further arguments $2…, unless it runs.
start_server() {
    local name=$1 port
    shift
    ! alive "$name" || return 0
    port=$(free_ports 1)
    # A server that ended comes back where it was: its pod has that address.
    [ ! -f "$run/sglang-$name.port" ] || port=$(cat "$run/sglang-$name.port")
    launch "$name" "$port" env \
        PYTHONPATH="$home/stand_ins" \
        CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS=1 \
        SGLANG_USE_CPU_ENGINE=1 SGLANG_HOST_IP=127.0.0.1 HOST_IP=127.0.0.1 MC_FORCE_TCP=1 MOONCAKE_PROTOCOL=tcp \
        "$venv/bin/python" -m sglang.launch_server --model-path "$model" --served-model-name tiny \
        --host 127.0.0.1 --port "$port" --enable-metrics --device cpu --attention-backend torch_native \
        --disable-cuda-graph --disable-overlap-schedule --context-length 4096 --max-total-tokens 16384 \
        --mem-fraction-static 0.1 "$@"
}

start() {
    setup
    local bootstrap name
    bootstrap=$(cat "$run/sglang-prefill.bootstrap" 2>/dev/null || free_ports 1)
    start_server prefill --disaggregation-mode prefill --disaggregation-transfer-backend mooncake \
        --disaggregation-bootstrap-port "$bootstrap"
    printf '%s\n' "$bootstrap" >"$run/sglang-prefill.bootstrap"
    # By default the decode server backs its KV up in pinned memory, which is CUDA's.
    start_server decode --disaggregation-mode decode --disaggregation-transfer-backend mooncake \
        --disaggregation-decode-retraction-backup cpu_tensor --disaggregation-decode-host-receive-threshold 1
    start_server plain
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
