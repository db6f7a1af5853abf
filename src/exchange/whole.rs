//! Requests that no pair of pods can share: a hand-off is good for one sequence, only generation has two phases, and some
//! fields ask for what is known to the prefill pod alone (`engine-protocols`, sections 2.5, 3.5, 3.9 and 4.6).
//!
//! Such a request goes to a combined pod. Without one, a vLLM decode pod computes it alone, prompt included: slower, but
//! right. Decode pods of SGLang and TensorRT-LLM cannot do that, so there the client is told which field it is.

use crate::engines;
use crate::fleet::Engine;
use crate::request::{Endpoint, ParsedBody};
use crate::routing::Splittable;

/// What makes a request one that has to be served whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whole {
    /// Its endpoint.
    Endpoint(Endpoint),
    /// This field of its body.
    Field(&'static str),
}

impl Whole {
    /// A sentence for the client of a model that has no pod for such a request.
    pub fn refusal(self, engine: Engine) -> String {
        let engine = engine.name();
        match self {
            Whole::Endpoint(endpoint) => format!(
                "{} does not work with prefill and decode on different {engine} pods, and this model has no pod that serves \
                 requests whole",
                endpoint.path()
            ),
            Whole::Field(field) => format!(
                "field \"{field}\" does not work with prefill and decode on different {engine} pods, and this model has no \
                 pod that serves requests whole"
            ),
        }
    }

    /// The field, for the error object.
    pub fn param(self) -> Option<&'static str> {
        match self {
            Whole::Endpoint(_) => None,
            Whole::Field(field) => Some(field),
        }
    }
}

/// What the pods of an engine make of such a request when no combined pod is there.
pub fn splittable(whole: Option<Whole>, engine: Engine) -> Splittable {
    match (whole, engine) {
        (None, _) => Splittable::Yes,
        (Some(Whole::Endpoint(endpoint)), _) if endpoint.only_tokenizes() => Splittable::No,
        (Some(_), Engine::Vllm | Engine::Other) => Splittable::No,
        (Some(_), Engine::Sglang | Engine::Trtllm) => Splittable::CombinedOnly,
    }
}

/// Whether a request has to be served whole by pods of this engine, and why.
pub fn whole(body: &ParsedBody, engine: Engine) -> Option<Whole> {
    if !engines::hands_over(engine, body.endpoint) {
        return Some(Whole::Endpoint(body.endpoint));
    }
    let fields = Fields(body);
    let field = if body.prompt.count > 1 {
        Some(fields.of_prompt())
    } else if body.choices > 1 {
        Some(fields.of_choices())
    } else if fields.on("use_beam_search") {
        Some("use_beam_search")
    } else if fields.value("prompt_logprobs").is_some() {
        Some("prompt_logprobs")
    } else if fields.on("echo") && fields.value("logprobs").is_some_and(|value| value != "false") {
        Some("echo")
    } else if body.endpoint == Endpoint::Responses && fields.on("background") {
        // Whoever asks for it later asks the pod that has it, which has to go on without the client.
        Some("background")
    } else if body.endpoint == Endpoint::Responses && fields.value("previous_response_id").is_some() {
        // Only the pod that has the earlier response knows the prompt.
        Some("previous_response_id")
    } else if engine == Engine::Sglang {
        fields.of_sglang()
    } else {
        None
    };
    field.map(Whole::Field)
}

/// Reads fields of which only little has to be known. Their types are the engine's to judge.
struct Fields<'a>(&'a ParsedBody);

impl Fields<'_> {
    /// The raw text of a value other than `null`.
    fn value(&self, key: &str) -> Option<&str> {
        let text = std::str::from_utf8(self.0.field(key)?).ok()?;
        (text != "null").then_some(text)
    }

    /// Something is asked for, in whatever spelling an engine takes for yes.
    fn on(&self, key: &str) -> bool {
        self.value(key).is_some_and(|value| !matches!(value, "false" | "0" | "[]" | "\"false\"" | "\"0\""))
    }

    fn of_prompt(&self) -> &'static str {
        match self.0.endpoint {
            Endpoint::Generate if self.value("text").is_some() => "text",
            Endpoint::Generate => "input_ids",
            _ => "prompt",
        }
    }

    fn of_choices(&self) -> &'static str {
        let several = |key| self.value(key).is_some_and(|value| value != "1");
        match self.0.endpoint {
            _ if several("n") => "n",
            _ if several("best_of") => "best_of",
            _ => "sampling_params",
        }
    }

    /// What an SGLang prefill pod has and nobody fetches: the states and log probabilities of the prompt, and sessions.
    fn of_sglang(&self) -> Option<&'static str> {
        if self.on("return_hidden_states") {
            return Some("return_hidden_states");
        }
        if self.value("session_params").is_some() {
            return Some("session_params");
        }
        // -1, the default, is where the output begins.
        let of_input = self.value("logprob_start_len").is_some_and(|from| from != "-1");
        (self.on("return_logprob") && of_input).then_some("logprob_start_len")
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn body(endpoint: Endpoint, members: &str) -> ParsedBody {
        let prompt = match endpoint {
            Endpoint::ChatCompletions => r#""messages":[]"#,
            Endpoint::Generate => r#""text":"a""#,
            _ => r#""prompt":"a""#,
        };
        let text = format!(r#"{{"model":"m",{prompt}{members}}}"#);
        ParsedBody::parse(endpoint, None, Bytes::from(text)).unwrap()
    }

    #[test]
    fn interop_13_14_what_has_to_be_served_whole() {
        use Endpoint::{ChatCompletions, Completions, Generate};
        let every = [Engine::Vllm, Engine::Sglang, Engine::Trtllm, Engine::Other];
        let sglang = [Engine::Sglang];
        for (endpoint, members, engines, field) in [
            (Completions, r#","n":2"#, &every[..], "n"),
            (ChatCompletions, r#","n":2.0"#, &every, "n"),
            (Completions, r#","n":1,"best_of":3"#, &every, "best_of"),
            (Completions, r#","best_of":2"#, &every, "best_of"),
            (Completions, r#","prompt":["a","b"]"#, &every, "prompt"),
            (Completions, r#","prompt":[[1],[2,3]],"n":2"#, &every, "prompt"),
            (ChatCompletions, r#","use_beam_search":true"#, &every, "use_beam_search"),
            (ChatCompletions, r#","prompt_logprobs":0"#, &every, "prompt_logprobs"),
            (Completions, r#","prompt_logprobs":-1"#, &every, "prompt_logprobs"),
            (Completions, r#","echo":true,"logprobs":0"#, &every, "echo"),
            (Generate, r#","sampling_params":{"n":2}"#, &every, "sampling_params"),
            (Generate, r#","text":["a","b"]"#, &every, "text"),
            (Generate, r#","text":null,"input_ids":[[1],[2]]"#, &every, "input_ids"),
            (ChatCompletions, r#","return_hidden_states":true"#, &sglang, "return_hidden_states"),
            (Generate, r#","session_params":{"id":"s"}"#, &sglang, "session_params"),
            (Generate, r#","return_logprob":true,"logprob_start_len":0"#, &sglang, "logprob_start_len"),
            (Generate, r#","return_logprob":[true],"logprob_start_len":[0]"#, &sglang, "logprob_start_len"),
        ] {
            let body = body(endpoint, members);
            for engine in every {
                let expected = engines.contains(&engine).then_some(Whole::Field(field));
                assert_eq!(whole(&body, engine), expected, "{members} for {engine:?}");
            }
        }
        assert_eq!(
            whole(
                &ParsedBody::parse(Endpoint::Embeddings, None, r#"{"model":"m","input":"a"}"#.into()).unwrap(),
                Engine::Vllm
            ),
            Some(Whole::Endpoint(Endpoint::Embeddings))
        );
    }

    #[test]
    fn interop_13_14_what_can_be_shared() {
        for members in [
            r#","n":1,"best_of":1"#,
            r#","n":null,"best_of":null,"prompt_logprobs":null,"session_params":null"#,
            r#","prompt":["a"]"#,
            r#","prompt":[[1,2]]"#,
            r#","echo":true"#,
            r#","echo":false,"logprobs":5"#,
            r#","echo":true,"logprobs":null"#,
            r#","use_beam_search":false"#,
            r#","return_hidden_states":false"#,
            r#","return_logprob":true"#,
            r#","return_logprob":true,"logprob_start_len":-1"#,
            r#","return_logprob":false,"logprob_start_len":0"#,
        ] {
            for engine in [Engine::Vllm, Engine::Sglang, Engine::Trtllm] {
                assert_eq!(whole(&body(Endpoint::Completions, members), engine), None, "{members}");
            }
        }
    }

    #[test]
    fn decode_pods_of_two_engines_cannot_do_it_alone() {
        let several = Some(Whole::Field("n"));
        for (engine, expected) in [
            (Engine::Vllm, Splittable::No),
            (Engine::Other, Splittable::No),
            (Engine::Sglang, Splittable::CombinedOnly),
            (Engine::Trtllm, Splittable::CombinedOnly),
        ] {
            assert_eq!(splittable(several, engine), expected);
            assert_eq!(splittable(None, engine), Splittable::Yes);
        }
        assert!(Whole::Field("n").refusal(Engine::Sglang).starts_with("field \"n\" does not work with"));
        assert_eq!((Whole::Field("n").param(), Whole::Endpoint(Endpoint::Rerank).param()), (Some("n"), None));
    }
}
