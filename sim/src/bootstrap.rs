//! What the port of the KV side channel answers to GET: SGLang's bootstrap server, and Mooncake's `/query`.

use bytes::Bytes;
use http::Response;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http_body_util::Full;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::ambient;
use crate::config::{Connector, Dialect};
use crate::record::End;
use crate::state::Core;

/// The question of an SGLang decode engine that does not know the prefill engine yet (as captured from 0.5.23).
pub(crate) const ROUTE: &str = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";

/// What it is told about the prefill engine.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Route {
    attn_tp_size: u32,
    /// Data-parallel ranks.
    pub dp_size: u32,
    page_size: u32,
    kv_cache_dtype: String,
    follow_bootstrap_room: bool,
    prefill_http_port: u16,
}

/// Answers one question.
pub(crate) async fn answer(core: &Core, head: &Parts) -> Response<Full<Bytes>> {
    match (core.config.dialect, head.uri.path()) {
        (Dialect::Sglang, "/health") => respond(200, "text/plain; charset=utf-8", "OK"),
        (Dialect::Sglang, "/route") => {
            let route = Route {
                attn_tp_size: 1,
                dp_size: core.config.dp_size,
                page_size: 1,
                kv_cache_dtype: "auto".to_owned(),
                follow_bootstrap_room: true,
                prefill_http_port: core.address.port(),
            };
            respond(200, "application/json; charset=utf-8", serde_json::to_vec(&route).unwrap_or_default())
        }
        (Dialect::Vllm, "/query") if core.config.connector == Connector::Mooncake => query(core, head).await,
        _ => respond(404, "text/plain; charset=utf-8", "404: Not Found"),
    }
}

/// A gateway asks this one, so it is recorded, and faults on its path apply as far as they script an answer.
async fn query(core: &Core, head: &Parts) -> Response<Full<Bytes>> {
    let seq = core.records.begin(head);
    core.changed();
    let fault = core.faults.take("/query", &head.headers);
    if let Some(fault) = &fault {
        ambient::pause(fault.head_delay).await;
    }
    let scripted = fault.and_then(|fault| fault.answer);
    let response = if let Some(scripted) = scripted {
        respond(scripted.status, "application/json", scripted.body.concat())
    } else {
        let worker = format!("tcp://{}:{}", core.address.ip(), core.side_channel_port);
        let ranks = json!({"0": {"engine_id": core.engine_id, "worker_addr": {"0": worker}}});
        respond(200, "application/json", serde_json::to_vec(&ranks).unwrap_or_default())
    };
    core.records.status(seq, response.status().as_u16());
    core.records.end(seq, End::Completed);
    core.changed();
    response
}

fn respond(status: u16, kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static(kind));
    response
}
