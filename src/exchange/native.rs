//! Engines that serve an endpoint under a path of their own.

use crate::request::Endpoint;

/// (value of `model.aibrix.ai/engine`, endpoint, path of the engine). All other engines serve the paths of the OpenAI API,
/// `xllm` among them, as in the reference gateway.
const NATIVE: &[(&str, Endpoint, &str)] =
    &[("xdit", Endpoint::ImagesGenerations, "/generate"), ("xdit", Endpoint::VideoGenerations, "/generatevideo")];

/// The path that the engine has for the endpoint, with the query of `path`; `None` = the path itself.
pub fn native_path(engine: &str, endpoint: Endpoint, path: &str) -> Option<String> {
    let (_, _, native) =
        NATIVE.iter().find(|(name, of, _)| *of == endpoint && engine.trim().eq_ignore_ascii_case(name))?;
    let query = path.split_once('?').map(|(_, query)| format!("?{query}")).unwrap_or_default();
    Some(format!("{native}{query}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xdit_has_its_own_paths_and_the_others_have_not() {
        for (engine, path, expected) in [
            ("xdit", "/v1/images/generations", Some("/generate")),
            ("xdit", "/v1/video/generations", Some("/generatevideo")),
            ("XDiT", "/v1/images/generations?n=1", Some("/generate?n=1")),
            ("xdit", "/v1/chat/completions", None),
            ("xllm", "/v1/images/generations", None),
            ("vllm", "/v1/images/generations", None),
            ("", "/v1/video/generations", None),
        ] {
            let endpoint = Endpoint::from_path(path).unwrap();
            assert_eq!(native_path(engine, endpoint, path).as_deref(), expected, "{engine} {path}");
        }
    }
}
