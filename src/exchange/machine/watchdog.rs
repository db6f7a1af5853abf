//! The decode watchdog: three timers over one answer (reference gateway, section 1.10).

use std::time::Duration;

use crate::clock::Tick;
use crate::knobs::DecodeWatchdog;
use crate::telemetry::WatchdogPhase;

/// Watches one answer, from the moment at which its pod owes one.
#[derive(Debug)]
pub(super) struct Watchdog {
    stream: bool,
    first: Option<Duration>,
    whole: Option<Duration>,
    idle: Option<Duration>,
    armed: Tick,
    /// The last sign of progress and how many there were.
    last: Option<(Tick, u64)>,
}

impl Watchdog {
    /// Starts the timers that apply. `stream`: the client asked for one.
    pub(super) fn arm(knobs: &DecodeWatchdog, sglang_pair: bool, stream: bool, now: Tick) -> Watchdog {
        Watchdog {
            stream,
            first: knobs.first_response.applies(sglang_pair),
            whole: knobs.response.applies(sglang_pair),
            idle: knobs.stream_idle.applies(sglang_pair),
            armed: now,
            last: None,
        }
    }

    /// The answer shows this much progress (events, or chunks of a body without events).
    pub(super) fn progress(&mut self, now: Tick, count: u64) {
        if count > self.last.map_or(0, |(_, before)| before) {
            self.last = Some((now, count));
        }
    }

    /// When the next timer runs out.
    pub(super) fn deadline(&self) -> Option<Tick> {
        let (start, time) = match (self.stream, self.last) {
            (false, _) => (self.armed, self.whole),
            (true, None) => (self.armed, self.first),
            (true, Some((last, _))) => (last.max(self.armed), self.idle),
        };
        time.map(|time| start.plus(time))
    }

    /// The timer that has run out, and its time.
    pub(super) fn expired(&self, now: Tick) -> Option<(WatchdogPhase, Duration)> {
        self.deadline().filter(|deadline| *deadline <= now)?;
        let (phase, time) = match (self.stream, self.last) {
            (false, _) => (WatchdogPhase::Response, self.whole),
            (true, None) => (WatchdogPhase::FirstResponse, self.first),
            (true, Some(_)) => (WatchdogPhase::StreamIdle, self.idle),
        };
        time.map(|time| (phase, time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knobs::DecodeTimer;

    fn at(millis: u64) -> Tick {
        Tick::from_millis(millis)
    }

    fn knobs(any_engine: bool) -> DecodeWatchdog {
        let timer = |seconds| DecodeTimer { time: Duration::from_secs(seconds), any_engine };
        DecodeWatchdog { first_response: timer(60), response: timer(5), stream_idle: timer(120) }
    }

    #[test]
    fn each_phase_has_its_timer() {
        let mut stream = Watchdog::arm(&knobs(true), false, true, at(1000));
        assert_eq!(stream.deadline(), Some(at(61_000)));
        assert_eq!(stream.expired(at(60_999)), None);
        assert_eq!(stream.expired(at(61_000)), Some((WatchdogPhase::FirstResponse, Duration::from_mins(1))));
        stream.progress(at(50_000), 0);
        assert_eq!(stream.deadline(), Some(at(61_000)), "comments are no progress");
        stream.progress(at(50_000), 1);
        assert_eq!(stream.deadline(), Some(at(170_000)));
        stream.progress(at(160_000), 1);
        assert_eq!(stream.deadline(), Some(at(170_000)), "nothing new");
        stream.progress(at(160_000), 3);
        assert_eq!(stream.deadline(), Some(at(280_000)));
        assert_eq!(stream.expired(at(280_000)).map(|(phase, _)| phase), Some(WatchdogPhase::StreamIdle));
        let mut whole = Watchdog::arm(&knobs(true), false, false, at(1000));
        whole.progress(at(2000), 7);
        assert_eq!(whole.expired(at(6000)).map(|(phase, _)| phase), Some(WatchdogPhase::Response));
    }

    #[test]
    fn an_answer_may_be_ahead_of_its_prefill_outcome() {
        let mut stream = Watchdog::arm(&knobs(true), false, true, at(10_000));
        stream.progress(at(9000), 4);
        assert_eq!(stream.deadline(), Some(at(130_000)));
    }

    #[test]
    fn timers_of_the_gateway_are_for_sglang_pairs() {
        assert_eq!(Watchdog::arm(&knobs(false), false, true, at(0)).deadline(), None);
        assert!(Watchdog::arm(&knobs(false), true, true, at(0)).deadline().is_some());
        let default = DecodeWatchdog::default();
        assert_eq!(
            Watchdog::arm(&default, true, false, at(0)).deadline(),
            None,
            "whole answers have no bound at first"
        );
        assert_eq!(Watchdog::arm(&default, true, true, at(0)).deadline(), Some(at(60_000)));
    }
}
