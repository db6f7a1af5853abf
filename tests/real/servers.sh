# What the set-up scripts of both engines need: a home for everything, ports, processes that can be found again.
#
# Sourced by vllm.sh and sglang.sh after they have set `engine`. Everything lives below $home, which is the directory
# argument, else $TANDEM_REAL_DIR, else target/real of the repository:
#   $home/$engine         the virtual environment
#   $home/model           the tiny model, the same for both engines
#   $home/run/$engine-*   for each server: its port, its process (id and start time), its log
# shellcheck shell=bash

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${1:-${TANDEM_REAL_DIR:-$here/../../target/real}}
mkdir -p "$home/run"
home=$(cd "$home" && pwd)
venv=$home/$engine
model=$home/model
run=$home/run

# Without bytecode files each of the many processes compiles torch anew: a minute each.
unset PYTHONDONTWRITEBYTECODE

say() { printf '%s: %s\n' "$engine" "$*" >&2; }

# The virtual environment, with uv in it, which installs these packages in a minute where pip takes many.
make_venv() {
    [ -x "$venv/bin/uv" ] && return
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
}

site_packages() { "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }

make_model() {
    [ -f "$model/model.safetensors" ] && return
    say "the tiny model into $model"
    rm -rf "$model.new"
    "$venv/bin/python" "$here/tiny_model.py" "$model.new"
    rm -rf "$model"
    mv "$model.new" "$model"
}

# Prints $1 free ports of the loopback interface, all different.
free_ports() {
    python3 - "$1" <<'PY'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in sockets:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in sockets))
PY
}

# The start time of process $1 in ticks since boot: with its id, that names it for ever. Nothing when it has ended.
started_at() {
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
    # The command may hold blanks and brackets; what follows the last bracket does not.
    set -- ${stat##*) }
    [ "$1" = Z ] || printf '%s' "${20}"
}

# Is server $1 running? Then $pid is its process, which leads a process group of its own.
alive() {
    local since
    [ -f "$run/$engine-$1.process" ] || return 1
    read -r pid since <"$run/$engine-$1.process"
    [ -n "$since" ] && [ "$(started_at "$pid")" = "$since" ]
}

# Starts server $1 on port $2: the rest is its command.
launch() {
    local name=$1 port=$2
    shift 2
    setsid "$@" >"$run/$engine-$name.log" 2>&1 </dev/null &
    printf '%s %s\n' $! "$(started_at $!)" >"$run/$engine-$name.process"
    printf '%s\n' "$port" >"$run/$engine-$name.port"
}

# Waits until server $1 is healthy.
wait_healthy() {
    local port since=$SECONDS
    port=$(cat "$run/$engine-$1.port")
    until curl --fail --silent --output /dev/null --max-time 5 "http://127.0.0.1:$port/health"; do
        if ! alive "$1"; then
            say "$1 ended, the end of its log:"
            tail -n 30 "$run/$engine-$1.log" >&2
            return 1
        fi
        if [ $((SECONDS - since)) -gt "${TANDEM_REAL_START_SECONDS:-900}" ]; then
            say "$1 is not healthy after $((SECONDS - since)) s, see $run/$engine-$1.log"
            return 1
        fi
        sleep 1
    done
    say "$1 serves on port $port"
}

# Prints the addresses, process groups and logs of the servers $@ as one JSON object.
print_addresses() {
    local name comma=
    printf '{'
    for name in "$@"; do
        alive "$name"
        printf '%s"%s":{"address":"127.0.0.1:%s","process":%s,"log":"%s"' \
            "$comma" "$name" "$(cat "$run/$engine-$name.port")" "$pid" "$run/$engine-$name.log"
        [ ! -f "$run/$engine-$name.bootstrap" ] || printf ',"bootstrap_port":%s' "$(cat "$run/$engine-$name.bootstrap")"
        printf '}'
        comma=,
    done
    printf '}\n'
}

# Stops the servers $@ with all their children: asks, waits, kills.
stop_servers() {
    local name groups=() group
    for name in "$@"; do
        if alive "$name"; then
            groups+=("$pid")
            kill -TERM -- "-$pid" 2>/dev/null || true
        fi
    done
    for group in "${groups[@]}"; do
        for _ in $(seq 1 100); do
            kill -0 -- "-$group" 2>/dev/null || break
            sleep 0.2
        done
        kill -KILL -- "-$group" 2>/dev/null || true
    done
    for name in "$@"; do
        rm -f "$run/$engine-$name.process" "$run/$engine-$name.port" "$run/$engine-$name.bootstrap"
    done
    say "stopped"
}
