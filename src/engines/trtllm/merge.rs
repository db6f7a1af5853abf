//! From a context worker's answer to the generation request, or to the client's answer (`engine-protocols` section 4.3).

use bytes::Bytes;

use super::super::{Handoff, HandoffError, plain_body};
use super::{Finished, PARAMS, finished, with_params};
use crate::fleet::Engine;
use crate::request::scan::{JsonObject, decode_string, each_element};
use crate::request::{Edit, Endpoint, ParsedBody, splice};

/// What follows from a context worker's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Merged {
    /// The generation worker gets this.
    Decode(Bytes, Handoff),
    /// The first token was the last one: the client gets this, and there is no generation leg.
    Finished(Finished),
}

/// Turns a context worker's answer into the generation request. Its `disaggregated_params` travel as they are, but for
/// `request_type`; so do the ids, which are the worker's, not those that it was asked with.
///
/// An answer that ended with anything but `length` or `not_finished` is the whole answer, since the worker keeps nothing
/// for another. (The reference gateway generates all the same.)
pub fn merge(body: &ParsedBody, answer: &[u8]) -> Result<Merged, HandoffError> {
    let object = JsonObject::parse(answer).map_err(|_| HandoffError::NotJson)?;
    let first = object.get("choices").and_then(first_object);
    match first.as_ref().and_then(|choice| choice.get("finish_reason")).and_then(decode_string).as_deref() {
        // Without a reason nothing says that it is over.
        None | Some("length" | "not_finished") => {}
        Some(reason) => {
            // What was given up is no answer, although it looks like one.
            let given_up = ["cancelled", "timeout", "abort", "error"].into_iter().find(|known| *known == reason);
            return match given_up {
                Some(reason) => Err(HandoffError::GaveUp(reason)),
                None => Ok(Merged::Finished(finished::answer(body, answer, &object))),
            };
        }
    }
    let params = object.get_non_null(PARAMS).or_else(|| first.as_ref()?.get_non_null(PARAMS));
    let Some(params) = params else {
        return Ok(Merged::Decode(plain_body(body, Some(Engine::Trtllm)), Handoff::Absent));
    };
    let members = JsonObject::parse(params.as_bytes()).map_err(|_| HandoffError::WrongType(PARAMS))?;
    if !members.get("ctx_request_id").is_some_and(is_integer) {
        return Err(HandoffError::NoId("ctx_request_id"));
    }
    if members.get_non_null("disagg_request_id").is_some_and(|id| !is_integer(id)) {
        return Err(HandoffError::NoId("disagg_request_id"));
    }
    let params = Bytes::copy_from_slice(params.as_bytes());
    let params = splice(&params, members.fields(), &[Edit::Set("request_type", br#""generation_only""#)]);
    let ids = object.get("prompt_token_ids").filter(|ids| ids.starts_with('[')).map(str::as_bytes);
    let ids = ids.and_then(|ids| match body.endpoint {
        Endpoint::Completions => Some(("prompt", ids)),
        Endpoint::ChatCompletions => Some(("prompt_token_ids", ids)),
        _ => None,
    });
    Ok(Merged::Decode(with_params(body, &params, ids), Handoff::Relayed))
}

/// The first element of a list of objects.
fn first_object(list: &str) -> Option<JsonObject<'_>> {
    let mut first = None;
    let _ = each_element(list, |element| {
        first = Some(element);
        false
    });
    JsonObject::parse(first?.as_bytes()).ok()
}

/// Digits, with a sign perhaps. (A fraction or an exponent would make a float of it somewhere.)
fn is_integer(value: &str) -> bool {
    let digits = value.strip_prefix('-').unwrap_or(value);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}
