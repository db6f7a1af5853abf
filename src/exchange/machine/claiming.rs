//! A selection that has to be committed in the state plane before anything is sent.

use std::sync::Arc;

use super::{Asked, Exchange, State};
use crate::clock::Tick;
use crate::exchange::event::Effect;
use crate::load::PlanePort;
use crate::routing::DecisionRecord;
use crate::state::plane::{ClaimOrder, Claimed};
use crate::telemetry::ClaimFallback;

/// A claim that was turned down so often is not made again, whatever time is left.
const MAX_CLAIMS: u32 = 16;

/// A request that is charged, and whose claim is on its way.
pub(super) struct Claiming {
    asked: Box<Asked>,
    record: Arc<DecisionRecord>,
}

/// The claims of one request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Claims {
    /// When the first was made.
    first: Option<Tick>,
    made: u32,
}

impl Exchange {
    /// Asks whether the selection stands; it was made on version `since` of what is known of the others.
    pub(super) fn claim(
        &mut self,
        now: Tick,
        asked: Box<Asked>,
        record: Arc<DecisionRecord>,
        since: u64,
        effects: &mut Vec<Effect>,
    ) -> State {
        let mut pods = Vec::with_capacity(2);
        if let Some(charges) = &self.charges {
            pods.extend(charges.prefill.as_ref().map(|charge| Arc::clone(charge.pod())));
            pods.push(Arc::clone(charges.decode.pod()));
        }
        self.claims.first.get_or_insert(now);
        self.claims.made += 1;
        effects.push(Effect::Claim(Box::new(ClaimOrder { model: Arc::clone(asked.model.home_name()), pods, since })));
        State::Claiming(Box::new(Claiming { asked, record }))
    }

    pub(super) fn on_claimed(
        &mut self,
        now: Tick,
        claiming: Claiming,
        claimed: Claimed,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Claiming { asked, record } = claiming;
        if claimed == Claimed::Again {
            let waited =
                self.claims.first.is_some_and(|first| now.since(first) >= self.world.knobs.plane.claim_deadline);
            if waited || self.claims.made >= MAX_CLAIMS {
                self.world.metrics.claim_fell_back(ClaimFallback::TooOften);
            } else {
                self.release_charges(now, false);
                return match self.select(now, asked, effects) {
                    Ok(state) => state,
                    Err((asked, error)) => self.not_routed(now, &asked, &error, effects),
                };
            }
        }
        match &record.outcome {
            Ok(decision) => self.start_legs(now, asked, decision, effects),
            // A claim is made for a decision only.
            Err(error) => self.not_routed(now, &asked, error, effects),
        }
    }

    /// Notes on how old a view of the others the selection was made, where there are any.
    pub(super) fn note_view(&self, now: Tick, port: &PlanePort) {
        if let Some(age) = port.age(now) {
            self.world.metrics.selected_on_view(age);
        }
    }
}
