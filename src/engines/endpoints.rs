//! Which requests two pods can share, by engine and endpoint: a hand-off works only where the engine's server reads it
//! from the request of that endpoint, and (prefill first) writes it into the answer. One table for each engine; the page
//! `docs/endpoints.md` is made from them.

use std::fmt::Write as _;

use crate::fleet::Engine;
use crate::request::{Edit, Endpoint};

/// What an engine's servers do with the hand-off of one endpoint's requests.
#[derive(Clone, Copy, Debug)]
pub struct Handover {
    /// The endpoint.
    pub endpoint: Endpoint,
    /// Whether a decode pod takes over from a prefill pod there.
    pub works: bool,
    /// The versions of which this is said, and what happens with others.
    pub versions: &'static str,
    /// Where it was seen.
    pub source: &'static str,
}

const fn row(endpoint: Endpoint, works: bool, versions: &'static str, source: &'static str) -> Handover {
    Handover { endpoint, works, versions, source }
}

/// vLLM reads and writes `kv_transfer_params`.
const VLLM: &[Handover] = &[
    row(Endpoint::ChatCompletions, true, "0.11 to 0.33", "measured with 0.32"),
    row(Endpoint::Completions, true, "0.11 to 0.33", "measured with 0.32"),
    row(
        Endpoint::Responses,
        true,
        "since March 2026; older prefill pods answer without a hand-off, and decode pods compute the prompt",
        "vllm-project/vllm pull request 37424",
    ),
    row(
        Endpoint::Messages,
        true,
        "since March 2026; older prefill pods answer without a hand-off, and decode pods compute the prompt",
        "vllm-project/vllm pull request 37535",
    ),
    row(Endpoint::Generate, true, "none: SGLang's own API; the 404 of the prefill pod is the answer", "not tried"),
];

/// SGLang reads `bootstrap_host`, `bootstrap_port` and `bootstrap_room`.
const SGLANG: &[Handover] = &[
    row(Endpoint::ChatCompletions, true, "0.4.6 to 0.5.23", "measured with 0.5.23"),
    row(Endpoint::Completions, true, "0.4.6 to 0.5.23", "measured with 0.5.23"),
    row(Endpoint::Generate, true, "0.4.6 to 0.5.23", "measured with 0.5.23"),
    row(
        Endpoint::Responses,
        false,
        "all: the fields are dropped, and the decode pod refuses the request for want of a room",
        "sgl-project/sglang issue 35497, pull request 36697 (closed)",
    ),
    row(
        Endpoint::Messages,
        false,
        "all: the fields are dropped, and the decode pod refuses the request for want of a room",
        "sgl-project/sglang issue 35229",
    ),
];

/// TensorRT-LLM reads and writes `disaggregated_params`.
const TRTLLM: &[Handover] = &[
    row(Endpoint::ChatCompletions, true, "1.2 to 1.4.0rc1", "source of 1.3.0rc8"),
    row(Endpoint::Completions, true, "1.2 to 1.4.0rc1", "source of 1.3.0rc8"),
    row(
        Endpoint::Responses,
        false,
        "all: served by aggregated workers only",
        "NVIDIA/TensorRT-LLM pull request 18497 (open)",
    ),
    row(
        Endpoint::Messages,
        false,
        "all: the worker turns it into a chat request and loses the field; served by aggregated workers only",
        "NVIDIA/TensorRT-LLM pull request 18289",
    ),
    row(Endpoint::Generate, true, "none: SGLang's own API; the 404 of the prefill pod is the answer", "not tried"),
];

/// Of an engine that nothing is known of: two requests without a hand-off, of whatever generates.
const OTHER: &[Handover] = &[
    row(Endpoint::ChatCompletions, true, "any: two requests, nothing is handed over", "none"),
    row(Endpoint::Completions, true, "any: two requests, nothing is handed over", "none"),
    row(Endpoint::Responses, true, "any: two requests, nothing is handed over", "none"),
    row(Endpoint::Messages, true, "any: two requests, nothing is handed over", "none"),
    row(Endpoint::Generate, true, "any: two requests, nothing is handed over", "none"),
];

/// The table of an engine. What is not in it generates nothing, and has but one phase.
pub fn table(engine: Engine) -> &'static [Handover] {
    match engine {
        Engine::Vllm => VLLM,
        Engine::Sglang => SGLANG,
        Engine::Trtllm => TRTLLM,
        Engine::Other => OTHER,
    }
}

/// Whether a prefill and a decode pod of this engine can share a request to this endpoint.
pub fn hands_over(engine: Engine, endpoint: Endpoint) -> bool {
    table(engine).iter().any(|row| row.endpoint == endpoint && row.works)
}

/// The field by which a request to this endpoint limits its output: what keeps a prefill leg at one token.
pub fn limit_field(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Responses => "max_output_tokens",
        // SGLang's `/generate` has its limit in `sampling_params`; its prefill pods make one token by themselves.
        _ => "max_tokens",
    }
}

/// The edits that keep a prefill leg at one token. Chat has two names for its limit, of which engines prefer now one, now
/// the other; TensorRT-LLM refuses a chat request with both, and any other with the second.
pub(super) fn one_token(endpoint: Endpoint, engine: Engine) -> Vec<Edit<'static>> {
    const NAMES: [&str; 2] = ["max_tokens", "max_completion_tokens"];
    match (endpoint, engine) {
        // This API knows neither of the two.
        (Endpoint::Responses, _) => {
            vec![Edit::Remove(NAMES[0]), Edit::Remove(NAMES[1]), Edit::Set(limit_field(endpoint), b"1")]
        }
        (_, Engine::Trtllm) => vec![Edit::Set(NAMES[0], b"1"), Edit::Remove(NAMES[1])],
        _ => NAMES.map(|name| Edit::Set(name, b"1")).to_vec(),
    }
}

/// The text of `docs/endpoints.md`.
pub fn endpoints_markdown() -> String {
    let mut page = String::from(
        "# Endpoints that can be split\n\n\
         <!-- Generated from src/engines/endpoints.rs; `TANDEM_REWRITE_DOCS=1 cargo test --lib generated` writes it anew. -->\n\n\
         Strategy `pd` sends a request to two pods if its engine hands requests of that endpoint over. Otherwise it goes to \
         a combined pod. Where the model has none, a vLLM decode pod computes it alone; for SGLang and TensorRT-LLM, whose \
         decode pods cannot, the answer is 400 and names the endpoint. What is not listed generates nothing (embeddings, \
         rerank, audio) and is never split.\n\n\
         The version of a pod is not asked for: where versions differ, the table says what the older ones do.\n",
    );
    for engine in [Engine::Vllm, Engine::Sglang, Engine::Trtllm, Engine::Other] {
        let title = if engine == Engine::Other { "any other" } else { engine.name() };
        let _ = write!(
            page,
            "\n## Engine {title}\n\n| endpoint | split | the prefill leg's limit | versions | source |\n|---|---|---|---|---|\n"
        );
        for Handover { endpoint, works, versions, source } in table(engine) {
            let split = if *works { "yes" } else { "**no**" };
            let limit = if *works { format!("`{}: 1`", limit_field(*endpoint)) } else { String::new() };
            let _ = writeln!(page, "| `{}` | {split} | {limit} | {versions} | {source} |", endpoint.path());
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_says_of_each_generating_endpoint_whether_it_is_handed_over() {
        use Endpoint::{ChatCompletions, Completions, Generate, Messages, Responses};
        for (engine, split) in [
            (Engine::Vllm, &[ChatCompletions, Completions, Responses, Messages, Generate][..]),
            (Engine::Sglang, &[ChatCompletions, Completions, Generate]),
            (Engine::Trtllm, &[ChatCompletions, Completions, Generate]),
            (Engine::Other, &[ChatCompletions, Completions, Responses, Messages, Generate]),
        ] {
            for endpoint in Endpoint::ALL {
                assert_eq!(hands_over(engine, endpoint), split.contains(&endpoint), "{engine:?} {endpoint:?}");
            }
            let mut named: Vec<&str> = table(engine).iter().map(|row| row.endpoint.path()).collect();
            named.sort_unstable();
            assert_eq!(
                named,
                ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"],
                "once each"
            );
            assert!(table(engine).iter().all(|row| !row.versions.is_empty() && !row.source.is_empty()));
        }
    }

    #[test]
    fn generated_endpoints_are_in_step() {
        crate::knobs::assert_generated("docs/endpoints.md", &endpoints_markdown());
    }
}
