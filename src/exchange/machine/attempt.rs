//! What one attempt goes by: its ids, and the path and the headers of its legs.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue};

use super::{Attempt, Exchange};
use crate::engines::lookup::LookedUp;
use crate::engines::vllm::mooncake::RankEngine;
use crate::engines::{Protocol, sglang};
use crate::exchange::headers::leg_headers;
use crate::exchange::native::native_path;
use crate::fleet::Pod;

impl Exchange {
    /// Notes the pod that will answer. Its load includes this request already.
    pub(super) fn aim_at(&mut self, pod: &Pod) {
        if self.record.target_pod.is_none() {
            let load = pod.state.load.view();
            self.record.outstanding_at_start = (load.pending + load.running).saturating_sub(1);
        }
        self.record.target_pod = Some(Arc::clone(&pod.state.labels));
        self.record.target_host = pod.spec.host.to_string();
    }

    /// Fresh ids for a pair. Both legs carry the same request id: the request's own, when nobody else can have it.
    pub(super) fn attempt(&self, protocol: Protocol) -> Attempt {
        let number = self.world.attempts.next();
        let id = match &self.head {
            Some(head) if head.id_is_unique && !self.retried => head.request_id.clone(),
            Some(head) => format!("{}-{number:016x}", head.request_id),
            None => String::new(),
        };
        let request_id = &self.record.request_id;
        let rid = protocol.aborts_by_rid().then(|| sglang::rid(request_id, number).into());
        Attempt { id, rid, number }
    }

    pub(super) fn attempt_id(&self) -> String {
        self.attempt(Protocol::Plain).id
    }

    /// The path of the pod that answers, or of any of the model's, when it is not the request's.
    pub(super) fn native_path(&self, pod: Option<&Pod>) -> Option<String> {
        let first = || self.asked.as_ref()?.model.routable.first().map(Arc::as_ref);
        let pod = pod.or_else(first)?;
        native_path(pod.spec.engine_label(), self.endpoint?, &self.head.as_ref()?.path)
    }

    pub(super) fn path(&self) -> String {
        self.head.as_ref().map(|head| head.path.clone()).unwrap_or_default()
    }

    pub(super) fn leg_headers(&self, attempt: &str) -> HeaderMap {
        let own = self.world.knobs.engine_auth.authorization.as_ref();
        self.head.as_ref().map(|head| leg_headers(&head.headers, attempt, own)).unwrap_or_default()
    }
}

/// The decode side will ask the engine of one data-parallel rank for the KV, so that rank has to compute it.
pub(super) fn prefill_headers(mut headers: HeaderMap, found: Option<&LookedUp>) -> HeaderMap {
    if let Some(LookedUp::Engine(RankEngine { pin: Some(rank), .. })) = found {
        headers.insert(HeaderName::from_static("x-data-parallel-rank"), HeaderValue::from(*rank));
    }
    headers
}
