//! What the stand-in for the API server has of the real one's wire: kinds, paths and refusals.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// A kind of object: plural and group.
pub const KINDS: [(&str, &str, &str); 7] = [
    ("pods", "/api/v1", "Pod"),
    ("modeladapters", "/apis/model.aibrix.ai/v1alpha1", "ModelAdapter"),
    ("httproutes", "/apis/gateway.networking.k8s.io/v1", "HTTPRoute"),
    ("deployments", "/apis/apps/v1", "Deployment"),
    ("statefulsets", "/apis/apps/v1", "StatefulSet"),
    ("stormservices", "/apis/orchestration.aibrix.ai/v1alpha1", "StormService"),
    ("rayclusterfleets", "/apis/orchestration.aibrix.ai/v1alpha1", "RayClusterFleet"),
];

/// Plural and namespace of a path.
pub fn place(path: &str) -> Option<(&'static str, Option<String>)> {
    KINDS.iter().find_map(|(plural, root, _)| {
        let rest = path.strip_prefix(root)?.strip_prefix('/')?;
        if rest == *plural {
            return Some((*plural, None));
        }
        let (namespace, last) = rest.strip_prefix("namespaces/")?.split_once('/')?;
        (last == *plural).then(|| (*plural, Some(namespace.to_owned())))
    })
}

pub fn gone() -> Response {
    status(410, "Expired", "too old resource version")
}

pub fn gone_line() -> String {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired",
        "message": "too old resource version",
    });
    json!({"type": "ERROR", "object": status}).to_string() + "\n"
}

pub fn status(code: u16, reason: &str, message: &str) -> Response {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": reason,
        "message": message,
    });
    let code = StatusCode::from_u16(code).expect("a status");
    (code, [("content-type", "application/json")], body.to_string()).into_response()
}
