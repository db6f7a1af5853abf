//! Requests about a response that an engine has stored (the Responses API): their paths name it.

use std::sync::Arc;

use http::Method;

/// What is asked about a stored response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredResponse {
    /// The id, as the path has it.
    pub id: Arc<str>,
    /// The path with a placeholder: a metric label.
    pub endpoint: &'static str,
    /// The methods that may be used.
    methods: &'static [Method],
}

impl StoredResponse {
    /// Reads a path; `None` when it is not about a stored response.
    pub fn from_path(path_and_query: &str) -> Option<StoredResponse> {
        let path = path_and_query.split_once('?').map_or(path_and_query, |(path, _)| path);
        let rest = path.strip_prefix("/v1/responses/")?;
        let (id, action) = rest.split_once('/').map_or((rest, None), |(id, action)| (id, Some(action)));
        let (endpoint, methods): (_, &[Method]) = match action {
            None => ("/v1/responses/{id}", &[Method::GET, Method::DELETE]),
            Some("cancel") => ("/v1/responses/{id}/cancel", &[Method::POST]),
            Some("input_items") => ("/v1/responses/{id}/input_items", &[Method::GET]),
            Some(_) => return None,
        };
        (!id.is_empty()).then(|| StoredResponse { id: id.into(), endpoint, methods })
    }

    /// Whether it may be asked by this method.
    pub fn allows(&self, method: &Method) -> bool {
        self.methods.contains(method)
    }

    /// The methods, as the header `allow` has them.
    pub fn allowed(&self) -> String {
        self.methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        for (path, id, endpoint, allowed) in [
            ("/v1/responses/resp_1", "resp_1", "/v1/responses/{id}", "GET, DELETE"),
            ("/v1/responses/resp_1?stream=true&starting_after=4", "resp_1", "/v1/responses/{id}", "GET, DELETE"),
            ("/v1/responses/resp_1/cancel", "resp_1", "/v1/responses/{id}/cancel", "POST"),
            ("/v1/responses/resp_1/input_items?limit=1", "resp_1", "/v1/responses/{id}/input_items", "GET"),
        ] {
            let found = StoredResponse::from_path(path).unwrap();
            assert_eq!((&*found.id, found.endpoint, found.allowed().as_str()), (id, endpoint, allowed));
            assert!(!found.allows(&Method::PUT));
        }
        for path in ["/v1/responses", "/v1/responses/", "/v1/responses/a/b", "/v1/responses/a/cancel/x", "/responses/a"]
        {
            assert_eq!(StoredResponse::from_path(path), None, "{path}");
        }
    }
}
