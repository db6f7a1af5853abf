//! Token usage as engines report it.

use crate::request::scan::JsonObject;

/// Token counts of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// `prompt_tokens`, else `input_tokens`.
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
    completion: Option<u64>,
    total: Option<u64>,
}

impl UsageSum {
    /// Takes the counts of one usage object; what is absent or no count stays as it was.
    pub(super) fn merge(&mut self, object: &str) {
        let Ok(object) = JsonObject::parse(object.as_bytes()) else { return };
        let count = |name: &str, other: &str| {
            let read = |key| object.get(key).and_then(|value: &str| value.parse::<u64>().ok());
            read(name).or_else(|| read(other))
        };
        let prompt = count("prompt_tokens", "input_tokens");
        let completion = count("completion_tokens", "output_tokens");
        let total = count("total_tokens", "total_tokens");
        if prompt.is_none() && completion.is_none() && total.is_none() {
            return;
        }
        self.prompt = prompt.or(self.prompt);
        self.completion = completion.or(self.completion);
        // An older total would contradict the newer parts.
        self.total = total;
    }

    /// The counts so far.
    pub(super) fn usage(&self) -> Option<Usage> {
        if self.prompt.is_none() && self.completion.is_none() && self.total.is_none() {
            return None;
        }
        let prompt_tokens = self.prompt.unwrap_or(0);
        let completion_tokens = self.completion.unwrap_or(0);
        let total_tokens = self.total.unwrap_or_else(|| prompt_tokens.saturating_add(completion_tokens));
        Some(Usage { prompt_tokens, completion_tokens, total_tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(objects: &[&str]) -> Option<(u64, u64, u64)> {
        let mut sum = UsageSum::default();
        for object in objects {
            sum.merge(object);
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
}
