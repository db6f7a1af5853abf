//! What a selection charges its pods.

use std::sync::Arc;
use std::time::Duration;

use super::{Decision, Target, ejections};
use crate::clock::Tick;
use crate::fleet::PodState;
use crate::knobs::PdKnobs;
use crate::load::{DecodeCharge, PrefillCharge, Probes, TokenCharge, TokenCharges};

/// The guards of one request's charges.
#[derive(Debug)]
pub struct Charges {
    /// The prefill leg, for a pair.
    pub prefill: Option<PrefillCharge>,
    /// The decode or combined pod.
    pub decode: DecodeCharge,
    /// What the token ledgers hold of it.
    pub tokens: TokenCharges,
    /// Ejected pods, or an ejected pair, that this request is the one to try. Dropped without a verdict of
    /// [`crate::load::Pairs::report`], another request may.
    pub probes: Probes,
    /// How often another selection of the model committed first, so that this one decided again.
    pub conflicts: u32,
    /// True when it was charged without the check, after too many conflicts.
    pub blind: bool,
}

impl Charges {
    /// Another decode pod serves the request: what the first was charged moves there. Tries of the first are
    /// given back, if it got no verdict.
    pub fn follow(&mut self, pod: &Arc<PodState>, ttl: Duration, now: Tick) {
        let mut decode = DecodeCharge::open(pod);
        decode.hand_over();
        self.decode = decode;
        (self.probes.decode, self.probes.pair) = (None, None);
        if let Some(charge) = self.tokens.decode.take() {
            self.tokens.decode = Some(TokenCharge::decode(pod, charge.tokens(), now, ttl));
            charge.finish(now);
        }
    }
}

/// Token charges that still have to be made; here is what they allocate.
pub(super) fn token_charges(decision: &Decision, knobs: &PdKnobs, now: Tick) -> [Option<TokenCharge>; 2] {
    let (prefill, decode) = pods(decision);
    let ttl = knobs.token_load_ttl;
    [
        prefill.zip(decision.tokens.prefill).map(|(pod, tokens)| TokenCharge::on_prefill(pod, tokens, now, ttl)),
        decision.tokens.decode.map(|tokens| TokenCharge::on_decode(decode, tokens, now, ttl)),
    ]
}

/// The prefill pod of a pair, and the decode or single pod.
fn pods(decision: &Decision) -> (Option<&Arc<PodState>>, &Arc<PodState>) {
    match &decision.target {
        Target::Pair { prefill, decode } => (Some(&prefill.state), &decode.state),
        Target::Single { pod, .. } => (None, &pod.state),
    }
}

/// Charges everything that the decision costs, in the same step as the selection. Others wait: nothing but atomic
/// steps.
pub(super) fn charge(
    decision: &Decision,
    [prefill_tokens, decode_tokens]: [Option<TokenCharge>; 2],
    tries: &ejections::Tries,
    now: Tick,
) -> Charges {
    let (prefill, decode) = pods(decision);
    Charges {
        prefill: prefill.map(PrefillCharge::open),
        decode: DecodeCharge::open(decode),
        tokens: TokenCharges::new(prefill_tokens.map(TokenCharge::charge), decode_tokens.map(TokenCharge::charge)),
        probes: tries.claim(now),
        conflicts: 0,
        blind: false,
    }
}
