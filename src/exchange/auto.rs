//! `config-profile: auto`: the gateway chooses the profile by the size of the request (reference section 2.3).
//!
//! The prompt is counted only as far as a hint can ask, and not at all when none does: then nothing has to wait.

use super::plan::bucket_length;
use super::prepare::PrepareJob;
use crate::fleet::{AUTO, Features, Model, Profile};
use crate::request::{ParsedBody, PromptForm};
use crate::routing::PromptLength;

/// The client leaves the choice to the gateway.
pub fn asked_for(wanted: Option<&str>) -> bool {
    wanted.is_some_and(|name| name.trim().eq_ignore_ascii_case(AUTO))
}

/// The count that the choice needs. Takes the prompt's text out of the body; it comes back in
/// [`super::Prepared::text`].
pub fn count(model: &Model, body: &mut ParsedBody, non_text_part: u64) -> PrepareJob {
    let non_text_tokens = body.non_text_tokens(non_text_part);
    let mut job = PrepareJob { non_text_tokens, ..PrepareJob::default() };
    let bound = model.config.as_ref().and_then(|config| config.largest_prompt_hint(body.max_tokens));
    if let Some(bound) = bound.filter(|_| body.prompt.token_ids.is_none() && body.prompt.form != PromptForm::None) {
        // "More than bound − 1" answers every question about a bound.
        job.count = Some((std::mem::take(&mut body.prompt.text), bound.saturating_sub(1)));
    }
    job
}

/// The profile that suits the request, else the default one; `None` where the model has neither.
pub fn choose<'m>(
    model: &'m Model,
    body: &ParsedBody,
    counted: PromptLength,
    non_text_part: u64,
) -> Option<&'m Profile> {
    let prompt_tokens = bucket_length(body, counted, non_text_part).tokens();
    let features = Features { prompt_tokens, max_tokens: body.max_tokens };
    model.config.as_ref()?.by_hints(features).map(AsRef::as_ref)
}
