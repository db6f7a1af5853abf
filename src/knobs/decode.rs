//! What bounds a decode pod that does not answer, and how an engine is told that nobody waits any more.

use std::time::Duration;

use super::parse;
use super::read::Reader;

/// One timer of the decode watchdog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeTimer {
    /// How long; zero = off.
    pub time: Duration,
    /// True when a profile asked for it: it then holds for every engine. The gateway-wide timers hold for SGLang only,
    /// as in the reference gateway (its section 1.10).
    pub any_engine: bool,
}

impl DecodeTimer {
    const fn of_sglang(seconds: u64) -> DecodeTimer {
        DecodeTimer { time: Duration::from_secs(seconds), any_engine: false }
    }

    /// The time for a request that was (not) served by SGLang pods as a pair; `None` = no timer.
    pub fn applies(self, sglang_pair: bool) -> Option<Duration> {
        (!self.time.is_zero() && (sglang_pair || self.any_engine)).then_some(self.time)
    }
}

/// The decode watchdog: armed once the prefill leg has succeeded and the request is with the decode pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeWatchdog {
    /// `AIBRIX_DECODE_FIRST_RESPONSE_TIMEOUT` (60 s): streams, until the first event.
    pub first_response: DecodeTimer,
    /// `AIBRIX_DECODE_RESPONSE_TIMEOUT` (0 = off): whole answers, until they are complete.
    pub response: DecodeTimer,
    /// `AIBRIX_DECODE_STREAM_IDLE_TIMEOUT` (120 s): streams, between two events.
    pub stream_idle: DecodeTimer,
}

impl Default for DecodeWatchdog {
    fn default() -> Self {
        DecodeWatchdog {
            first_response: DecodeTimer::of_sglang(60),
            response: DecodeTimer::of_sglang(0),
            stream_idle: DecodeTimer::of_sglang(120),
        }
    }
}

/// How a decode pod is asked to drop a request (SGLang's `/abort_request`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbortKnobs {
    /// `AIBRIX_DECODE_ABORT_TIMEOUT` (3 s): bound on one call; zero = no aborts.
    pub timeout: Duration,
    /// `AIBRIX_DECODE_ABORT_RETRY_DELAY` (2 s): until the second call, since the first can overtake the request that it
    /// is about; zero = no second call.
    pub retry_delay: Duration,
}

impl Default for AbortKnobs {
    fn default() -> Self {
        AbortKnobs { timeout: Duration::from_secs(3), retry_delay: Duration::from_secs(2) }
    }
}

fn seconds(duration: &Duration) -> String {
    duration.as_secs_f64().to_string()
}

pub(super) fn read(reader: &mut Reader<'_>) -> (DecodeWatchdog, AbortKnobs) {
    let default = DecodeWatchdog::default();
    let mut time = |name, default| reader.value(name, default, parse::decimal_seconds_or_zero, seconds);
    let abort = AbortKnobs {
        timeout: time("AIBRIX_DECODE_ABORT_TIMEOUT", AbortKnobs::default().timeout),
        retry_delay: time("AIBRIX_DECODE_ABORT_RETRY_DELAY", AbortKnobs::default().retry_delay),
    };
    let mut timer = |name, default: DecodeTimer| DecodeTimer { time: time(name, default.time), ..default };
    let watchdog = DecodeWatchdog {
        first_response: timer("AIBRIX_DECODE_FIRST_RESPONSE_TIMEOUT", default.first_response),
        response: timer("AIBRIX_DECODE_RESPONSE_TIMEOUT", default.response),
        stream_idle: timer("AIBRIX_DECODE_STREAM_IDLE_TIMEOUT", default.stream_idle),
    };
    (watchdog, abort)
}
