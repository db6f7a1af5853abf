//! Limits on the requests of a model and of a user: places are taken last, so that a request which is refused for itself
//! takes nobody's, and kept once it goes on to the pod that answers it.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};

use super::{Admitting, Exchange, Routing, State};
use crate::clock::Tick;
use crate::error::{ApiError, Reason};
use crate::exchange::event::Effect;
use crate::request::Endpoint;
use crate::routing::PromptLength;
use crate::state::limits::{LimitCall, LimitRefusal, LimitVerdict, MAX_USER_NAME, ModelLimit, Places};
use crate::telemetry::Outcome;

/// The header that names the user (the reference gateway, section 1.3).
pub(super) const USER: &str = "user";
/// What the user has been charged, in the head of the answer.
const REQUESTS: HeaderName = HeaderName::from_static("x-update-rpm");
const TOKENS: HeaderName = HeaderName::from_static("x-update-tpm");
/// Its value is the message (the reference gateway, section 1.4).
const USAGE_NOT_ASKED: &str = "x-error-no-stream-options-include-usage";

/// Envoy waits for each reply for 200 ms, unless it is set up otherwise or asked to: a wait that comes near has to be
/// announced.
const LONG: Duration = Duration::from_millis(100);

impl Exchange {
    /// Asks for places, and waits for them.
    pub(super) fn admit(
        &mut self,
        routing: Routing,
        counted: Option<PromptLength>,
        call: LimitCall,
        effects: &mut Vec<Effect>,
    ) -> State {
        if let Some(wait) = self.world.limits.as_ref().map(|limits| limits.wait()).filter(|wait| *wait > LONG) {
            self.extend(wait.saturating_add(routing.plan.knobs.prefill_request_timeout), effects);
        }
        effects.push(Effect::ChargeLimits(Box::new(call)));
        State::Admitting(Box::new(Admitting { routing, counted }))
    }

    /// The places that a request needs from all replicas. What this one can give by itself is taken here.
    pub(super) fn limits_of(&mut self, now: Tick, routing: &Routing) -> Result<Option<LimitCall>, ApiError> {
        if self.world.knobs.disable_rate_limiting {
            return Ok(None);
        }
        let Routing { model, plan, .. } = routing;
        let per_second = plan.rate_limit.map(|limit| limit.per_second(model.routable.len()));
        if self.world.limits.is_none() {
            if let Some(limit) = per_second {
                let refused = || model_refused(&model.name, limit);
                self.places = Places::from(model.rate.admit(limit, now).ok_or_else(refused)?);
            }
            return Ok(None);
        }
        let user = self.head.as_ref().map_or(Ok(None), |head| user(&head.headers))?;
        let model = per_second.map(|per_second| ModelLimit {
            model: Arc::clone(&model.name),
            per_second,
            window: Arc::clone(&model.rate),
        });
        Ok(Some(LimitCall { user, model }).filter(|call| !call.is_empty()))
    }

    pub(super) fn on_limits(
        &mut self,
        now: Tick,
        admitting: Admitting,
        verdict: LimitVerdict,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Admitting { routing, counted } = admitting;
        self.places = match verdict {
            Ok(places) => places,
            Err(refusal) => return self.refuse(now, refused(refusal, &routing.model.name), effects),
        };
        let body = &routing.body;
        let untold = body.endpoint == Endpoint::ChatCompletions && body.stream && !body.include_usage;
        if untold && self.places.counts_tokens() {
            let text = "include usage for stream options not set";
            let error = ApiError::new(Reason::UsageNotAsked, text).with_param("stream_options");
            return self.refuse(now, error.with_header(USAGE_NOT_ASKED, text), effects);
        }
        self.prepare(now, routing, counted, effects)
    }

    /// Tells what the user has been charged, this request included. (The reference does so at the end of the answer, when
    /// no header can be sent any more; the tokens of this answer are therefore not among them.)
    pub(super) fn tell_counts(&mut self) {
        if let Some(counts) = self.places.user_counts() {
            self.answer_headers.insert(REQUESTS, HeaderValue::from(counts.requests));
            self.answer_headers.insert(TOKENS, HeaderValue::from(counts.tokens));
        }
    }

    /// The request is over. Not served: its places are free for another one. A client that leaves while a pod works for it
    /// has used its place, or hanging up would get around the limit; and a prefill pod may have had the whole answer.
    pub(super) fn settle_limits(&mut self, outcome: Outcome) {
        let served = match outcome {
            Outcome::Success => true,
            Outcome::ClientGone => self.record.timings.prefill_start.is_some(),
            _ => false,
        };
        if served {
            self.places.keep();
        }
        if let Some(usage) = self.record.usage {
            self.places.spend(usage.total_tokens);
        }
        self.places = Places::default();
    }
}

/// The user that the request names. Of several, the last one counts, as in the reference; an empty name is none.
fn user(headers: &HeaderMap) -> Result<Option<Arc<str>>, ApiError> {
    let Some(value) = headers.get_all(USER).iter().next_back() else { return Ok(None) };
    match std::str::from_utf8(value.as_bytes().trim_ascii()) {
        Ok("") => Ok(None),
        Ok(name) if name.len() <= MAX_USER_NAME => Ok(Some(name.into())),
        // Nobody is called that.
        _ => Err(user_unknown()),
    }
}

fn user_unknown() -> ApiError {
    ApiError::new(Reason::UserUnknown, "the user of the request does not exist")
}

fn model_refused(model: &str, limit: u32) -> ApiError {
    let text = format!("model {model} takes {limit} requests per second and has had them");
    ApiError::new(Reason::RateLimited, text)
}

/// What the client is told.
fn refused(refusal: LimitRefusal, model: &str) -> ApiError {
    let exceeded = |reason, limit: u64, what: &str, ends_in: Duration| {
        let text = format!("the user may have {limit} {what} per minute and has had them");
        let seconds = ends_in.as_secs_f64().ceil().max(1.0);
        ApiError::new(reason, text).with_header("retry-after", &seconds.to_string())
    };
    match refusal {
        LimitRefusal::UserUnknown => user_unknown(),
        LimitRefusal::UserUnreadable => {
            ApiError::new(Reason::UserUnknown, "the limits of the request's user cannot be read")
        }
        LimitRefusal::UserUncountable => {
            ApiError::new(Reason::UserUncountable, "the requests of the user cannot be counted at the moment")
        }
        LimitRefusal::UserRequests(limit, ends_in) => {
            exceeded(Reason::UserRequestsExceeded, limit, "requests", ends_in)
        }
        LimitRefusal::UserTokens(limit, ends_in) => exceeded(Reason::UserTokensExceeded, limit, "tokens", ends_in),
        LimitRefusal::Model(limit) => model_refused(model, limit),
        LimitRefusal::ModelUncountable => {
            ApiError::new(Reason::RateUncountable, "the requests of the model cannot be counted at the moment")
        }
    }
}
