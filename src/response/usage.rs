//! Token usage as engines report it.

use crate::request::Endpoint;
use crate::request::scan::JsonObject;

/// The API in which an answer is written, as far as accounts and errors differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Api {
    /// Chat completions, completions and whatever else counts as they do.
    #[default]
    OpenAi,
    /// `/v1/messages`: what the prompt cache had is counted beside `input_tokens`, and `error` ends a stream.
    Messages,
    /// `/v1/responses`: `response.failed` and `error` end a stream.
    Responses,
}

impl Api {
    /// The API of an endpoint.
    pub fn of(endpoint: Endpoint) -> Api {
        match endpoint {
            Endpoint::Messages => Api::Messages,
            Endpoint::Responses => Api::Responses,
            _ => Api::OpenAi,
        }
    }

    /// Whether its clients take an event of this type for the failure of the answer.
    pub(super) fn fails_by(self, event: &str) -> bool {
        match self {
            Api::OpenAi => false,
            Api::Messages => event == "error",
            Api::Responses => event == "error" || event == "response.failed",
        }
    }
}

/// Token counts of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// `prompt_tokens`, else `input_tokens`; of the Messages API, with the tokens that were read from the prompt cache or
    /// written to it, which `input_tokens` leaves out there.
    pub prompt_tokens: u64,
    /// `completion_tokens`, else `output_tokens`.
    pub completion_tokens: u64,
    /// `total_tokens`, else the sum.
    pub total_tokens: u64,
}

/// Usage put together from several reports, field by field: Anthropic streams give the prompt's tokens at the start
/// and the answer's at the end, and continuous usage repeats everything with every event.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UsageSum {
    prompt: Option<u64>,
    /// Of the Messages API: written to the prompt cache, read from it.
    cached: [Option<u64>; 2],
    completion: Option<u64>,
    total: Option<u64>,
}

impl UsageSum {
    /// Takes the counts of one usage object; what is absent or no count stays as it was.
    pub(super) fn merge(&mut self, object: &str, api: Api) {
        let Ok(object) = JsonObject::parse(object.as_bytes()) else { return };
        let count = |name: &str, other: &str| {
            let read = |key| object.get(key).and_then(|value: &str| value.parse::<u64>().ok());
            read(name).or_else(|| read(other))
        };
        let prompt = count("prompt_tokens", "input_tokens");
        let completion = count("completion_tokens", "output_tokens");
        let mut total = count("total_tokens", "total_tokens");
        let mut cached = [None; 2];
        if api == Api::Messages && object.get("prompt_tokens").is_none() {
            cached = ["cache_creation_input_tokens", "cache_read_input_tokens"].map(|name| count(name, name));
            // Not of this API, so who adds it may have left the cache out.
            total = total.filter(|_| prompt.is_none() && completion.is_none() && cached == [None; 2]);
        }
        if prompt.is_none() && completion.is_none() && total.is_none() && cached == [None; 2] {
            return;
        }
        for (known, told) in self.cached.iter_mut().zip(cached) {
            *known = told.or(*known);
        }
        self.prompt = prompt.or(self.prompt);
        self.completion = completion.or(self.completion);
        // An older total would contradict the newer parts.
        self.total = total;
    }

    /// The counts so far.
    pub(super) fn usage(&self) -> Option<Usage> {
        let prompt = [self.prompt, self.cached[0], self.cached[1]];
        if prompt == [None; 3] && self.completion.is_none() && self.total.is_none() {
            return None;
        }
        let prompt_tokens = prompt.into_iter().flatten().fold(0, u64::saturating_add);
        let completion_tokens = self.completion.unwrap_or(0);
        let total_tokens = self.total.unwrap_or_else(|| prompt_tokens.saturating_add(completion_tokens));
        Some(Usage { prompt_tokens, completion_tokens, total_tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(objects: &[&str]) -> Option<(u64, u64, u64)> {
        merged_by(Api::OpenAi, objects)
    }

    fn merged_by(api: Api, objects: &[&str]) -> Option<(u64, u64, u64)> {
        let mut sum = UsageSum::default();
        for object in objects {
            sum.merge(object, api);
        }
        sum.usage().map(|usage| (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens))
    }

    type Case<'a> = (&'a [&'a str], Option<(u64, u64, u64)>);

    #[test]
    fn reports_merge_field_by_field() {
        let max = format!("{{\"prompt_tokens\":{},\"completion_tokens\":9}}", u64::MAX);
        let cases: [Case<'_>; 13] = [
            (&[], None),
            (&["{}"], None),
            (&["null"], None),
            (&["[1]"], None),
            (&[r#"{"prompt_tokens":"3"}"#], None),
            (&[r#"{"prompt_tokens":-1,"completion_tokens":1.5}"#], None),
            (&[r#"{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}"#], Some((3, 4, 7))),
            (&[r#"{"input_tokens":3,"output_tokens":4}"#], Some((3, 4, 7))),
            (&[r#"{"prompt_tokens":0,"input_tokens":3}"#], Some((0, 0, 0))),
            (&[r#"{"total_tokens":9}"#], Some((0, 0, 9))),
            (&[r#"{"input_tokens":25,"output_tokens":1}"#, r#"{"output_tokens":15}"#], Some((25, 15, 40))),
            (&[r#"{"prompt_tokens":3,"total_tokens":3}"#, r#"{"completion_tokens":2}"#], Some((3, 2, 5))),
            (&[&max], Some((u64::MAX, 9, u64::MAX))),
        ];
        for (objects, expected) in cases {
            assert_eq!(merged(objects), expected, "{objects:?}");
        }
    }

    #[test]
    fn messages_count_the_cache_beside_the_input() {
        let start =
            r#"{"input_tokens":8,"cache_creation_input_tokens":40,"cache_read_input_tokens":600,"output_tokens":1}"#;
        let cases: [Case<'_>; 7] = [
            (&[start], Some((648, 1, 649))),
            (&[start, r#"{"output_tokens":15}"#], Some((648, 15, 663))),
            // The end repeats all of it.
            (&[start, r#"{"input_tokens":9,"cache_read_input_tokens":600,"output_tokens":15}"#], Some((649, 15, 664))),
            (&[r#"{"input_tokens":8,"cache_creation_input_tokens":null,"output_tokens":2}"#], Some((8, 2, 10))),
            (&[r#"{"cache_read_input_tokens":600}"#], Some((600, 0, 600))),
            (
                &[r#"{"input_tokens":8,"cache_read_input_tokens":600,"output_tokens":2,"total_tokens":10}"#],
                Some((608, 2, 610)),
            ),
            // Counts in the words of another API are that API's: the cache is inside.
            (&[r#"{"prompt_tokens":608,"cache_read_input_tokens":600,"completion_tokens":2}"#], Some((608, 2, 610))),
        ];
        for (objects, expected) in cases {
            assert_eq!(merged_by(Api::Messages, objects), expected, "{objects:?}");
        }
        let inside =
            r#"{"input_tokens":608,"input_tokens_details":{"cached_tokens":600},"output_tokens":2,"total_tokens":610}"#;
        assert_eq!(merged_by(Api::Responses, &[inside]), Some((608, 2, 610)));
        let chat = r#"{"prompt_tokens":608,"prompt_tokens_details":{"cached_tokens":600},"cache_read_input_tokens":600,"completion_tokens":2,"total_tokens":610}"#;
        for api in [Api::OpenAi, Api::Responses] {
            assert_eq!(merged_by(api, &[chat]), Some((608, 2, 610)));
        }
    }
}
