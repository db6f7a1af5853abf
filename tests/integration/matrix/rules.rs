//! What must hold for every cell, whatever the table says.

use std::time::Duration;

use serde_json::Value;

use super::cells::{Cell, Dialect, Fault, Leg};
use super::play::{Outcome, content};
use super::stage::{PREFILL_TIMEOUT, WATCHDOG};

/// The way in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Envoy,
    Front,
}

/// A rule: what it says, and whether an outcome keeps it.
type Rule = (&'static str, fn(Way, &Outcome) -> bool);

const RULES: [Rule; 17] = [
    ("nobody waits beyond the timers", |_, o| o.seen.over - o.seen.start < PREFILL_TIMEOUT + WATCHDOG + BUSY),
    ("what is known is told at once", |_, o| !o.is_late()),
    ("an engine gets a request once", |_, o| o.prefill.requests <= 1 && o.decode.requests <= 1),
    ("a pod that refuses connections gets nothing", |_, o| {
        o.cell.fault != Fault::Refused || [&o.prefill, &o.decode][o.cell.leg as usize].requests == 0
    }),
    ("prefill first: without its answer, nothing is asked of decode", |_, o| {
        !prefill_failed(o) || o.cell.dialect.is_concurrent() || o.decode.requests == 0
    }),
    ("a failed prefill fails the request, unless decode is talking", |_, o| {
        !prefill_failed(o) || o.cell.leaves || o.decode_talked() || !o.succeeded()
    }),
    ("a leg that fails beside a decode pod ends that pod's request", |_, o| {
        !prefill_failed(o)
            || o.decode_talked()
            || o.decode.requests == 0
            || o.decode.stopped == 1
            || o.decode.aborts > 0
    }),
    ("SGLang: two aborts at decode for a prefill that fails before the first event, else none", |_, o| {
        let due = prefill_failed(o) && !o.cell.leaves && !o.decode_talked();
        let asked = o.cell.dialect == Dialect::Sglang && o.cell.leg == Leg::Prefill && !o.cell.leaves;
        !asked || o.decode.requests == 0 || o.decode.aborts == if due { 2 } else { 0 }
    }),
    ("only SGLang is aborted by a call", |_, o| {
        o.cell.dialect == Dialect::Sglang || o.prefill.aborts + o.decode.aborts == 0
    }),
    ("a prefill pod's refusal is the client's answer, with its status", |_, o| {
        !(o.cell.fault == Fault::Status4xx && o.cell.leg == Leg::Prefill && o.seen.status != Some(200))
            || o.seen.status == Some(400)
    }),
    ("an answer of the gateway says whose fault it is", |_, o| {
        let prefill = o.cell.leg == Leg::Prefill && o.seen.status.is_some_and(|status| status >= 400);
        let gateways = o.sees.contains("prefill failed") || o.sees.contains("watchdog") || prefill;
        !gateways || o.seen.marker("x-error-pd-prefill") || o.seen.marker("x-error-pd-decode")
    }),
    ("the watchdog's answer is 504 with its marker", |_, o| {
        !o.sees.contains("watchdog") || o.seen.status == Some(504) && o.seen.marker("x-error-pd-decode")
    }),
    ("an error is one JSON object with a message", |_, o| {
        let Some(400..) = o.seen.status else { return true };
        let error: Value = serde_json::from_slice(&o.seen.body).unwrap_or_default();
        error["error"]["message"].as_str().is_some_and(|message| !message.is_empty())
    }),
    ("a decode pod's own error passes as it is", |_, o| {
        let status = match (o.cell.leg, o.cell.fault) {
            (Leg::Decode, Fault::Status4xx) => 400,
            (Leg::Decode, Fault::Status5xx) => 500,
            _ => return true,
        };
        o.seen.status == Some(status) && o.sees.ends_with("the engine's words")
    }),
    ("nothing after an error event looks like a good end", |_, o| {
        let error = matches!(o.cell.fault, Fault::ErrorBeforeContent | Fault::ErrorAfterContent);
        // A cut, or an end right behind the event that says so.
        let last = o.seen.events().last().is_some_and(|event| event.contains("\"error\""));
        !error || !o.succeeded() && !o.sees.contains("DONE") && (o.seen.status != Some(200) || !o.seen.complete || last)
    }),
    ("an answer that breaks off does not look complete", |_, o| {
        let broken = matches!(o.cell.fault, Fault::ResetInBody | Fault::HangAfterHead | Fault::HangInBody);
        !(broken && o.cell.leg == Leg::Decode) || o.cell.leaves || !o.succeeded()
    }),
    ("what does not fail works", |_, o| !works(o) || o.succeeded()),
];

/// What a busy machine may add to all timers together.
const BUSY: Duration = Duration::from_secs(5);

/// The rules that an outcome breaks.
pub fn broken(way: Way, outcome: &Outcome) -> Vec<&'static str> {
    RULES.iter().filter(|(_, holds)| !holds(way, outcome)).map(|(rule, _)| *rule).collect()
}

/// The prefill leg came to nothing. (In a cell whose client left, only if that was so before.)
fn prefill_failed(outcome: &Outcome) -> bool {
    let cell = outcome.cell;
    cell.leg == Leg::Prefill
        && match cell.fault {
            Fault::SlowBytes => cell.leaves && !cell.dialect.is_concurrent(),
            Fault::BadJson => !cell.dialect.survives_bad_response(),
            // With both legs out, the KV is there: decode has answered before the prefill timeout.
            Fault::WrongTypes | Fault::HangAfterHead | Fault::HangInBody => !cell.dialect.is_concurrent(),
            _ => !cell.leaves || !cell.dialect.is_concurrent(),
        }
}

/// The client gets a good answer in spite of the fault.
fn works(outcome: &Outcome) -> bool {
    let cell = outcome.cell;
    let concurrent = cell.dialect.is_concurrent();
    !cell.leaves
        && match (cell.leg, cell.fault) {
            (_, Fault::Nothing | Fault::SlowBytes) => true,
            (Leg::Prefill, Fault::BadJson) => cell.dialect.survives_bad_response(),
            (Leg::Prefill, Fault::WrongTypes | Fault::HangAfterHead | Fault::HangInBody) => concurrent,
            _ => false,
        }
}

impl Outcome {
    /// The client has what looks like a whole answer.
    pub fn succeeded(&self) -> bool {
        let events = self.seen.events();
        self.seen.status == Some(200)
            && self.seen.complete
            && if self.cell.stream {
                content(&events) && events.last().is_some_and(|event| event == "[DONE]")
            } else {
                self.sees == "200, answer"
            }
    }

    /// The decode pod had begun to answer when the prefill leg failed, so that it must have had the KV. (A head of
    /// TensorRT-LLM proves nothing.)
    fn decode_talked(&self) -> bool {
        let Cell { dialect, leg, fault, stream, .. } = self.cell;
        let proves = matches!(dialect, Dialect::VllmMooncake | Dialect::Sglang);
        leg == Leg::Prefill && fault == Fault::ResetInBody && stream && proves
    }
}
