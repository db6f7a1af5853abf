//! The answers that generate nothing.

use serde_json::json;

use super::failure::quote;
use crate::ambient;
use crate::answer::Reply;
use crate::config::Role;
use crate::state::Core;

/// `/v1/models`.
pub(crate) fn models(core: &Core) -> Reply {
    let entries: Vec<_> =
        std::iter::once(&core.config.model).chain(&core.config.aliases).map(|id| entry(core, id)).collect();
    Reply::json(200, format!(r#"{{"object":"list","data":[{}]}}"#, entries.join(",")))
}

/// `/v1/models/{name}`: here an unknown name is an error, unlike in a generation.
pub(crate) fn model(core: &Core, name: &str) -> Reply {
    if name == core.config.model || core.config.aliases.iter().any(|alias| alias == name) {
        return Reply::json(200, entry(core, name));
    }
    let message = quote(&format!("The model '{name}' does not exist"));
    let error =
        format!(r#"{{"message":{message},"type":"invalid_request_error","param":"model","code":"model_not_found"}}"#);
    Reply::json(404, format!(r#"{{"error":{error}}}"#))
}

fn entry(core: &Core, id: &str) -> String {
    format!(
        r#"{{"id":{0},"object":"model","created":{1},"owned_by":"sglang","root":{0},"parent":null,"max_model_len":{2}}}"#,
        quote(id),
        ambient::unix_seconds(),
        core.config.capacity.max_model_len
    )
}

/// `disaggregation_mode` as SGLang spells it.
pub(crate) fn mode(core: &Core) -> &'static str {
    match core.config.role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Combined => "null",
    }
}

/// `/server_info`, the part of it that a gateway may look at.
pub(crate) fn server_info(core: &Core) -> Reply {
    let config = &core.config;
    Reply::value(
        200,
        &json!({"model_path": config.model, "served_model_name": config.model, "version": "0.5.23",
            "context_length": config.capacity.max_model_len, "max_total_num_tokens": config.capacity.kv_tokens,
            "tp_size": 1, "dp_size": config.dp_size, "page_size": 1, "disaggregation_mode": mode(core),
            "disaggregation_bootstrap_port": core.side_channel_port, "load_balance_method": "follow_bootstrap_room",
            "internal_states": [{"effective_max_running_requests_per_dp": config.capacity.max_running}]}),
    )
}

/// `/model_info`.
pub(crate) fn model_info(core: &Core) -> Reply {
    let model = &core.config.model;
    Reply::value(200, &json!({"model_path": model, "tokenizer_path": model, "is_generation": true}))
}

/// `/v1/loads`: queue depths of the ranks; everything is at rank 0.
pub(crate) fn loads(core: &Core) -> Reply {
    let stats = core.stats();
    let special = stats.bootstrapping;
    Reply::value(
        200,
        &json!({"dp_rank_count": core.config.dp_size, "loads": [{"dp_rank": 0, "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting.saturating_sub(special), "num_used_tokens": stats.kv_used_tokens,
            "disaggregation": {"mode": mode(core), "prefill_bootstrap_queue_reqs": stats.bootstrapping}}]}),
    )
}
