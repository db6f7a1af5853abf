//! What requests are taken to be by the APIs that they use.

use std::time::Duration;

use super::parse;
use super::read::{Reader, secs};

/// What the APIs of requests bring with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiKnobs {
    /// `TANDEM_NON_TEXT_PART_TOKENS` (1000): what an image, a recording or a file in a prompt counts in every estimate.
    pub non_text_part_tokens: u64,
    /// `TANDEM_RESPONSE_TTL_SECONDS` (3600 s): for how long after the last look it is known where a stored response is.
    pub response_ttl: Duration,
}

impl Default for ApiKnobs {
    fn default() -> ApiKnobs {
        ApiKnobs { non_text_part_tokens: 1000, response_ttl: Duration::from_hours(1) }
    }
}

pub(super) fn read(reader: &mut Reader<'_>) -> ApiKnobs {
    let default = ApiKnobs::default();
    ApiKnobs {
        non_text_part_tokens: reader.value(
            "TANDEM_NON_TEXT_PART_TOKENS",
            default.non_text_part_tokens,
            parse::positive_tokens,
            u64::to_string,
        ),
        response_ttl: reader.value("TANDEM_RESPONSE_TTL_SECONDS", default.response_ttl, parse::seconds, secs),
    }
}
