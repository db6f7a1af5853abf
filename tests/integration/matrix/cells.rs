//! The cells of the matrix: which there are, which cannot be and why, and how each is brought about.

use std::time::Duration;

use tandem_sim::{Cut, EngineConfig, Fault as Script, StreamHead, Timing};

/// How a pair of pods is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    VllmShfs,
    VllmMooncake,
    Sglang,
    TrtContextFirst,
    TrtGenerationFirst,
}

impl Dialect {
    pub const ALL: [Dialect; 5] = [
        Dialect::VllmShfs,
        Dialect::VllmMooncake,
        Dialect::Sglang,
        Dialect::TrtContextFirst,
        Dialect::TrtGenerationFirst,
    ];

    pub fn title(self) -> &'static str {
        match self {
            Dialect::VllmShfs => "vLLM, `shfs`: prefill first",
            Dialect::VllmMooncake => "vLLM, `mooncake`: both at once",
            Dialect::Sglang => "SGLang: both at once",
            Dialect::TrtContextFirst => "TensorRT-LLM, `context_first`: prefill first",
            Dialect::TrtGenerationFirst => "TensorRT-LLM, `generation_first`: both at once",
        }
    }

    /// Both legs are sent at once.
    pub fn is_concurrent(self) -> bool {
        matches!(self, Dialect::VllmMooncake | Dialect::Sglang | Dialect::TrtGenerationFirst)
    }

    /// A prefill answer that nobody can read is no failure: the KV has moved.
    pub fn survives_bad_response(self) -> bool {
        matches!(self, Dialect::VllmMooncake | Dialect::Sglang)
    }

    /// The engine of a role, which takes its time for each token, so that things can happen meanwhile.
    pub fn configure(self, config: EngineConfig) -> EngineConfig {
        let config = config.timing(Timing { decode_base: TOKEN, ..Timing::instant() });
        match self {
            Dialect::VllmShfs => config,
            Dialect::VllmMooncake => config.mooncake(),
            // As the current version does. Engines that send the head at once are in the other tables.
            Dialect::Sglang => config.sglang().stream_head(StreamHead::WithFirstToken),
            Dialect::TrtContextFirst | Dialect::TrtGenerationFirst => config.trtllm(),
        }
    }
}

/// Time of one generated token.
const TOKEN: Duration = Duration::from_millis(100);
/// Tokens of an answer.
pub const TOKENS: u32 = 12;
/// When a prefill leg fails that runs beside a decode leg: after a decode pod that has all it needs has begun, and before
/// it has finished.
const LATE: Duration = Duration::from_millis(300);
/// When a decode leg fails that runs beside a prefill leg: after both are out.
const BOTH_OUT: Duration = Duration::from_millis(150);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg {
    Prefill,
    Decode,
}

/// What a pod does to its leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Nothing,
    Refused,
    ResetBeforeHead,
    ResetInBody,
    HangBeforeHead,
    HangAfterHead,
    HangInBody,
    Status4xx,
    Status5xx,
    BadJson,
    WrongTypes,
    SlowBytes,
    ErrorBeforeContent,
    ErrorAfterContent,
    NoDone,
}

impl Fault {
    pub const ALL: [Fault; 15] = [
        Fault::Nothing,
        Fault::Refused,
        Fault::ResetBeforeHead,
        Fault::ResetInBody,
        Fault::HangBeforeHead,
        Fault::HangAfterHead,
        Fault::HangInBody,
        Fault::Status4xx,
        Fault::Status5xx,
        Fault::BadJson,
        Fault::WrongTypes,
        Fault::SlowBytes,
        Fault::ErrorBeforeContent,
        Fault::ErrorAfterContent,
        Fault::NoDone,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Fault::Nothing => "none",
            Fault::Refused => "connect refused",
            Fault::ResetBeforeHead => "reset before headers",
            Fault::ResetInBody => "reset mid-body",
            Fault::HangBeforeHead => "hang before headers",
            Fault::HangAfterHead => "hang after headers",
            Fault::HangInBody => "hang mid-body",
            Fault::Status4xx => "400",
            Fault::Status5xx => "500",
            Fault::BadJson => "200, bad JSON",
            Fault::WrongTypes => "200, wrong types",
            Fault::SlowBytes => "slow bytes",
            Fault::ErrorBeforeContent => "error event before content",
            Fault::ErrorAfterContent => "error event after content",
            Fault::NoDone => "no `[DONE]`",
        }
    }

    /// It goes on for a while, so that a client can leave meanwhile.
    pub fn lasts(self) -> bool {
        matches!(self, Fault::HangBeforeHead | Fault::HangAfterHead | Fault::HangInBody | Fault::SlowBytes)
    }

    /// Only event streams can have it.
    fn of_streams(self) -> bool {
        matches!(self, Fault::ErrorBeforeContent | Fault::ErrorAfterContent | Fault::NoDone)
    }
}

/// One experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub dialect: Dialect,
    pub leg: Leg,
    pub fault: Fault,
    /// The client asks for a stream.
    pub stream: bool,
    /// The client leaves while the fault lasts.
    pub leaves: bool,
}

/// Why combinations are left out; part of the page.
pub const LEFT_OUT: &str = "\
Left out, because they cannot be: events and `[DONE]` of a prefill answer or of any other answer that is no stream. Left \
out, because they are another row: a client that leaves when the fault is over (a leg that failed has ended the request, \
and one that did not fail left nothing behind), or before it begins (the row of a pod that hangs). The moment between \
the legs, when the prefill pod has answered and the decode pod has heard nothing yet, cannot be met from outside; tests of \
`drive` stand in it (`interop_15b`).\n";

impl Cell {
    fn can_be(self) -> bool {
        match self.fault {
            Fault::Nothing => self.leg == Leg::Decode && !self.leaves,
            fault if fault.of_streams() => self.leg == Leg::Decode && self.stream && !self.leaves,
            fault => !self.leaves || fault.lasts(),
        }
    }

    /// All cells of a dialect, in the order of the page.
    pub fn all(dialect: Dialect) -> Vec<Cell> {
        let mut cells = Vec::new();
        for leg in [Leg::Prefill, Leg::Decode] {
            for fault in Fault::ALL {
                for leaves in [false, true] {
                    for stream in [true, false] {
                        cells.push(Cell { dialect, leg, fault, stream, leaves });
                    }
                }
            }
        }
        cells.retain(|cell| cell.can_be());
        cells
    }

    /// The label of the pods that it goes to: a pod that refuses connections is a pod of its own.
    pub fn lane(self) -> &'static str {
        match (self.fault, self.leg) {
            (Fault::Refused, Leg::Prefill) => "no-prefill",
            (Fault::Refused, Leg::Decode) => "no-decode",
            _ => "live",
        }
    }

    /// What the simulator of the leg is told; `tag` marks the requests of this cell.
    pub fn script(self, tag: &str) -> Option<Script> {
        let script = Script::on("/v1/").header("x-cell", tag);
        let wait = match self.leg {
            _ if !self.dialect.is_concurrent() => Duration::ZERO,
            Leg::Prefill => LATE,
            Leg::Decode => BOTH_OUT,
        };
        let (prefill, streams) = (self.leg == Leg::Prefill, self.leg == Leg::Decode && self.stream);
        // Events of a stream; halves of any other body.
        let inside = if streams { 3 } else { 1 };
        let error = |text| format!(r#"{{"error":{{"message":"{text}","type":"Scripted","param":null,"code":7}}}}"#);
        let json = "application/json";
        Some(match self.fault {
            Fault::Nothing | Fault::Refused => return None,
            Fault::ResetBeforeHead => script.head_delay(wait).cut_before_head(Cut::Reset),
            Fault::ResetInBody if prefill => script.first_byte_delay(wait).cut_after(inside, Cut::Reset),
            Fault::ResetInBody if streams => script.cut_after(inside, Cut::Reset),
            // What was sent has to be through Envoy before the connection breaks, or it makes an answer of its own.
            Fault::ResetInBody => script.slow_bytes(100, LATE).cut_after(inside, Cut::Reset),
            Fault::HangBeforeHead => script.hang(),
            Fault::HangAfterHead => script.stall_after(0),
            Fault::HangInBody => script.stall_after(inside),
            Fault::Status4xx => script.head_delay(wait).answer(400, json, error(ENGINE_REFUSES)),
            Fault::Status5xx => script.head_delay(wait).answer(500, json, error(ENGINE_FAILS)),
            // The prefill pod does its work and only then talks nonsense, or its KV would be missing.
            Fault::BadJson if prefill => script.bad_json().after_work().first_byte_delay(wait),
            Fault::BadJson => script.head_delay(wait).bad_json(),
            Fault::WrongTypes if prefill && self.dialect == Dialect::TrtContextFirst => {
                script.answer(200, json, WRONG_PARAMS).after_work()
            }
            Fault::WrongTypes if prefill => script.wrong_types().after_work().first_byte_delay(wait),
            Fault::WrongTypes => script.head_delay(wait).wrong_types(),
            Fault::SlowBytes => script.slow_bytes(100, Duration::from_millis(if self.leaves { 100 } else { 20 })),
            Fault::ErrorBeforeContent => script.error_event_after(1),
            Fault::ErrorAfterContent => script.error_event_after(3),
            Fault::NoDone => script.omit_done(),
        })
    }

    /// Whether the other leg's request was sent before this one failed is chance: nothing can hold a refusal back.
    pub fn is_a_race(self) -> bool {
        self.fault == Fault::Refused && self.dialect.is_concurrent()
    }

    pub fn body(self) -> String {
        let Cell { stream, .. } = self;
        format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":"hello there"}}],"max_tokens":{TOKENS},"stream":{stream}}}"#
        )
    }
}

/// What the scripted 400 says.
pub const ENGINE_REFUSES: &str = "the engine refuses";
/// What the scripted 500 says.
pub const ENGINE_FAILS: &str = "the engine fails";
/// A context worker's answer of which everything can be read but the hand-off.
const WRONG_PARAMS: &str = r#"{"choices":[{"index":0,"finish_reason":"length","disaggregated_params":"oops"}]}"#;
