//! `/server_info` and `/v1/models`.

use serde_json::json;

use crate::ambient;
use crate::answer::Reply;
use crate::config::Role;
use crate::state::Core;

/// Where the context worker's transceiver takes requests; the C++ transceiver does not say, nor do other workers.
pub(crate) fn endpoint(core: &Core) -> Option<String> {
    let told = core.config.role == Role::Prefill && !core.config.cpp_transceiver;
    told.then(|| format!("tcp://{}", std::net::SocketAddr::new(core.address.ip(), core.side_channel_port)))
}

/// `/server_info`.
pub(crate) fn answer(core: &Core) -> Reply {
    let params = match endpoint(core) {
        Some(endpoint) => json!({"ctx_info_endpoint": endpoint, "ctx_dp_rank": 0}),
        None => json!({}),
    };
    Reply::value(200, &json!({"disaggregated_params": params}))
}

/// `/v1/models`.
pub(crate) fn models(core: &Core) -> Reply {
    let created = ambient::unix_seconds();
    let entry = |id| json!({"id": id, "object": "model", "created": created, "owned_by": "tensorrt_llm"});
    let data: Vec<_> = std::iter::once(&core.config.model).chain(&core.config.aliases).map(entry).collect();
    Reply::value(200, &json!({"object": "list", "data": data}))
}
