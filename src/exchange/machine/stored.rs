//! Stored responses (the Responses API): each is with the pod that made it, so a follow-up goes there, and so does whatever
//! else is asked about it.

use std::sync::Arc;

use bytes::Bytes;

use super::legs::refusal;
use super::{Asked, Exchange, State};
use crate::clock::Tick;
use crate::engines;
use crate::error::{ApiError, Reason};
use crate::exchange::answer::Answer;
use crate::exchange::event::Effect;
use crate::fleet::{Model, Pod, Role};
use crate::request::{Endpoint, ParsedBody};
use crate::response::Api;
use crate::routing::{Splittable, charge_pinned};
use crate::state::responses::{Home, is_response_id};

/// A request whose response is looked for.
pub(super) enum Locating {
    /// It is about that response; its own body, if it has one.
    About(Bytes),
    /// It goes on from there.
    FollowUp(Box<ParsedBody>, Arc<Model>),
}

/// The response that a body follows up.
pub(super) fn previous_response(body: &ParsedBody) -> Option<Arc<str>> {
    let value = body.field("previous_response_id").filter(|_| body.endpoint == Endpoint::Responses)?;
    let id: String = serde_json::from_slice(value).ok()?;
    is_response_id(&id).then(|| id.into())
}

impl Exchange {
    /// Looks here, then with the others.
    pub(super) fn locate(&mut self, now: Tick, id: Arc<str>, locating: Locating, effects: &mut Vec<Effect>) -> State {
        let responses = &self.world.responses;
        let home = is_response_id(&id).then(|| responses.known(&id, now)).flatten();
        if home.is_some() || !responses.asks_others() || !is_response_id(&id) {
            return self.on_response_found(now, locating, home, effects);
        }
        effects.push(Effect::FindResponse(id));
        State::Locating(Box::new(locating))
    }

    pub(super) fn on_response_found(
        &mut self,
        now: Tick,
        locating: Locating,
        home: Option<Home>,
        effects: &mut Vec<Effect>,
    ) -> State {
        match (locating, home) {
            (Locating::About(body), Some(home)) => {
                let snapshot = self.world.fleet.load();
                let found = snapshot.model(&home.model).and_then(|model| Some((model, pod_of(model, &home)?)));
                let Some((model, pod)) = found else { return self.gone_response(now, effects) };
                self.record.model = Some(Arc::clone(&model.name));
                if let Some(in_flight) = &mut self.in_flight {
                    in_flight.set_model(&model.name);
                }
                self.go_to(now, model, &pod, body, effects)
            }
            (Locating::About(_), None) => {
                let text = "no response of this id is known here: it was never stored, or not looked at for too long";
                let error = ApiError::new(Reason::ResponseUnknown, text).with_param("response_id");
                self.refuse(now, error, effects)
            }
            (Locating::FollowUp(body, model), Some(home)) => match pod_of(&model, &home) {
                None => self.gone_response(now, effects),
                pod => {
                    self.pinned = pod;
                    self.on_examined(now, *body, model, effects)
                }
            },
            // Wherever it goes, the engine says whether it has it.
            (Locating::FollowUp(body, model), None) => self.on_examined(now, *body, model, effects),
        }
    }

    fn gone_response(&mut self, now: Tick, effects: &mut Vec<Effect>) -> State {
        let text = "the response is lost: the pod that had it is gone or was restarted";
        let error = ApiError::new(Reason::ResponseUnknown, text);
        let param = if self.about.is_some() { "response_id" } else { "previous_response_id" };
        self.refuse(now, error.with_param(param), effects)
    }

    /// A follow-up whose response is with this pod.
    pub(super) fn route_pinned(
        &mut self,
        now: Tick,
        asked: &Asked,
        pod: &Arc<Pod>,
        effects: &mut Vec<Effect>,
    ) -> State {
        if asked.plan.splittable == Splittable::CombinedOnly && pod.spec.role != Role::Other {
            return self.refuse(now, refusal(&asked.plan), effects);
        }
        let body = engines::plain_body(&asked.body, Some(pod.spec.engine));
        self.go_to(now, &asked.model, pod, body, effects)
    }

    /// To this pod and no other: it does not start over elsewhere.
    fn go_to(
        &mut self,
        now: Tick,
        model: &Arc<Model>,
        pod: &Arc<Pod>,
        body: Bytes,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.record.timings.routed = Some(now);
        self.record.single_reason = Some("stored_response");
        self.record.ready_pods = model.routable.len();
        self.record.candidate_pods = 1;
        self.pairs = Some(Arc::clone(&model.pairs));
        self.charges = Some(charge_pinned(model, pod));
        self.hand_over(now, Some(pod), body, None, effects)
    }

    /// Tells where the response is that an answer brings.
    pub(super) fn remember_response(&mut self, now: Tick, answer: &Answer) {
        if self.remembered || self.about.is_some() || self.endpoint.map(Api::of) != Some(Api::Responses) {
            return;
        }
        let (Some(id), Some(charges), Some(model)) = (answer.response_id(), &self.charges, &self.record.model) else {
            return;
        };
        self.remembered = true;
        let home = Home { pod: charges.decode.pod().id, model: Arc::clone(model) };
        self.world.responses.remember(id, home, now);
    }
}

/// The pod, if it is still what it was. It need not be ready: there is no other.
fn pod_of(model: &Model, home: &Home) -> Option<Arc<Pod>> {
    model.pods.iter().find(|pod| pod.state.id == home.pod).cloned()
}
