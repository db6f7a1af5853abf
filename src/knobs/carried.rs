//! What values cost that come from the manifests of the reference gateway: one line each in the start-up report.

use super::read::Reader;
use super::{PlaneKnobs, PrefixKnobs, parse};

/// Shorter blocks than these are told of.
const SHORT_BLOCK: usize = 16;

/// Lines for the report. Values that cost nothing are not mentioned.
pub(super) fn notes(reader: &Reader<'_>, prefix: &PrefixKnobs, plane: &PlaneKnobs) -> Vec<String> {
    let mut notes = Vec::new();
    if is(reader, STATESYNC, false) && plane.share_prefixes {
        notes.push(format!(
            "{STATESYNC} is false, AIBrix's default, and has no effect here: replicas with a Redis share prefixes, sessions and \
             failures; TANDEM_SHARED_PREFIXES=false turns off the first"
        ));
    }
    if plane.findings_period > PlaneKnobs::default().findings_period {
        let period = plane.findings_period.as_millis();
        notes.push(format!(
            "AIBRIX_STATESYNC_SYNC_PERIOD is {period} ms: replicas hear so late of one another's prefixes and sessions (default: \
             100 ms)"
        ));
    }
    if let Some(blocks) = prefix.max_blocks {
        let bytes = blocks.saturating_mul(prefix.block_size);
        notes.push(format!(
            "AIBRIX_PREFIX_CACHE_BLOCK_NUMBER is {blocks}: the prefix index remembers {bytes} bytes of prompts; unset, it takes as \
             many as TANDEM_PREFIX_CACHE_BYTES has room for"
        ));
    }
    if prefix.block_size < SHORT_BLOCK {
        let size = prefix.block_size;
        notes.push(format!(
            "AIBRIX_PREFIX_CACHE_BLOCK_SIZE is {size}: a prompt has {} times the blocks that it has by default, and all of \
             them are hashed, kept and told",
            128 / size
        ));
    }
    if is(reader, "AIBRIX_DISABLE_RATE_LIMITING", true) {
        notes.push(
            "AIBRIX_DISABLE_RATE_LIMITING is true: the limits of models and users do not hold, and users are not looked up"
                .to_owned(),
        );
    }
    let shows_own = reader.raw("TANDEM_ENGINE_API_KEY").is_some() || is(reader, "TANDEM_FORWARD_AUTH_TOKEN", true);
    if reader.raw("AIBRIX_AUTH_BEARER_TOKEN").is_some() && !shows_own {
        notes.push(
            "AIBRIX_AUTH_BEARER_TOKEN is set, and ends here: engines that want a key get it from TANDEM_ENGINE_API_KEY, or the \
             token itself by TANDEM_FORWARD_AUTH_TOKEN=true"
                .to_owned(),
        );
    }
    if reader.raw("ROUTING_ALGORITHM").is_some_and(|strategy| strategy == "random") {
        notes.push(
            "ROUTING_ALGORITHM is random: requests that name no strategy go to any pod, and are not split between prefill and \
             decode pods"
                .to_owned(),
        );
    }
    notes
}

/// The reference's switch of its own way to share prefixes. [`notes`] has what is to be said of it.
pub(super) const STATESYNC: &str = "AIBRIX_STATESYNC_ENABLED";

fn is(reader: &Reader<'_>, name: &'static str, wanted: bool) -> bool {
    reader.raw(name).is_some_and(|text| parse::boolean(&text) == Ok(wanted))
}
