//! The state plane.

use super::{Group, one};

pub(super) const PLANE: Group = Group {
    title: "The state plane",
    settings: &[
        one(
            "REDIS_URL",
            "unset",
            "secret",
            "",
            "Where replicas share their state: `redis://`, `rediss://` (TLS; trusts the authorities of the system, or those in the file that `SSL_CERT_FILE` names), `redis-cluster://`, `redis-sentinel://`. Unset, and without `REDIS_HOST`, each replica knows only its own requests.",
        ),
        one("REDIS_HOST", "unset", "text", "", "The same as a host name."),
        one("REDIS_PORT", "6379", "port", "", "Port on `REDIS_HOST`."),
        one("REDIS_PASSWORD", "unset", "secret", "", "Password for `REDIS_HOST`."),
        one(
            "TANDEM_STATE_PLANE_GRADE",
            "paced",
            "`paced` or `claim`",
            "",
            "`paced`: no request waits for Redis. `claim`: each decision is committed there in one call, or made again (see [the state plane](state-plane.md)).",
        ),
        one(
            "TANDEM_STATE_PLANE_PACE_MS",
            "5",
            "milliseconds",
            "",
            "Time between two publications of a model, at least.",
        ),
        one(
            "TANDEM_STATE_PLANE_BUDGET",
            "0.2",
            "part of 1",
            "",
            "Part of one core of Redis that the publications of one model may take; with many replicas the pace widens to stay within it.",
        ),
        one(
            "TANDEM_CLAIM_DEADLINE_MS",
            "5",
            "milliseconds",
            "",
            "How long a request waits for its claim before it goes on as if paced.",
        ),
        one(
            "AIBRIX_TOKEN_LOAD_SHARED_LEDGER",
            "true",
            "boolean",
            "",
            "Decode tokens that other replicas have charged count in `token_load`.",
        ),
        one(
            "TANDEM_SHARED_PREFILL",
            "true",
            "boolean",
            "",
            "Prefill legs and prefill tokens of other replicas count too. `false`: both are local to a replica, as in the PD document.",
        ),
        one(
            "TANDEM_SHARED_PREFIXES",
            "true",
            "boolean",
            "",
            "Replicas tell one another which prefixes pods hold. (`AIBRIX_STATESYNC_ENABLED` has no effect.)",
        ),
        one(
            "AIBRIX_STATESYNC_SYNC_PERIOD",
            "100ms",
            "Go duration",
            "",
            "How often they tell that, and the sizes of sessions' prompts. That a pod fails is told within 100 ms.",
        ),
        one(
            "TANDEM_RATE_LIMIT_FALLBACK",
            "local",
            "`local`, `open` or `closed`",
            "",
            "Rate limits while Redis cannot be asked: each replica counts for itself with its part of the limit, everything passes, or nothing does.",
        ),
        one(
            "TANDEM_RATE_LIMIT_WAIT_MS",
            "50",
            "milliseconds",
            "",
            "How long a request waits for Redis to count it before that setting decides.",
        ),
    ],
};
