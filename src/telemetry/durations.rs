//! From the moments of a request to its durations (the reference gateway, section 9.1).

use std::time::Duration;

use super::record::{RequestRecord, Timings};
use crate::clock::Tick;

/// Durations of one request. `None` = the moments for it did not happen, or it has no meaning here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Durations {
    /// Head to start of the prefill leg; without such a leg, to the choice of the pod.
    pub(super) routing: Option<Duration>,
    /// The prefill leg, when it ended.
    pub(super) prefill: Option<Duration>,
    /// End of the prefill leg to the first answer byte; zero when the answer began before it, as engines that run both
    /// legs at once allow.
    pub(super) kv_transfer: Option<Duration>,
    /// Head to the **first** answer byte of a stream, to the last byte of any other answer.
    pub(super) ttft: Option<Duration>,
    /// First to last answer byte of a stream; for any other answer, from the end of the prefill leg, else from the
    /// hand-over.
    pub(super) decode: Option<Duration>,
    /// `decode` per completion token of a stream.
    pub(super) tpot: Option<Duration>,
    /// Head to end.
    pub(super) total: Option<Duration>,
}

impl Durations {
    /// The durations of a finished request.
    pub(super) fn of(record: &RequestRecord) -> Durations {
        let completion_tokens = record.usage.map_or(0, |usage| usage.completion_tokens);
        Durations::from_moments(&record.timings, record.stream, completion_tokens)
    }

    fn from_moments(moments: &Timings, stream: bool, completion_tokens: u64) -> Durations {
        let between = |from: Option<Tick>, to: Option<Tick>| Some(to?.since(from?));
        let received = Some(moments.received);
        let first_token = if stream { moments.first_chunk } else { moments.last_chunk };
        let decode_start = if stream { moments.first_chunk } else { moments.prefill_end.or(moments.handed_over) };
        let decode = between(decode_start, moments.last_chunk);
        let tokens = u32::try_from(completion_tokens).unwrap_or(u32::MAX);
        Durations {
            routing: between(received, moments.prefill_start.or(moments.routed)),
            prefill: between(moments.prefill_start, moments.prefill_end),
            kv_transfer: between(moments.prefill_end, first_token),
            ttft: between(received, first_token),
            decode,
            tpot: if stream { decode.and_then(|decode| decode.checked_div(tokens)) } else { None },
            total: between(received, moments.ended),
        }
    }
}

/// Milliseconds for logs.
pub(super) fn millis(duration: Option<Duration>) -> Option<f64> {
    duration.map(|duration| duration.as_secs_f64() * 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::unnecessary_wraps, reason = "moments are optional")]
    fn at(millis: u64) -> Option<Tick> {
        Some(Tick::from_millis(millis))
    }

    #[allow(clippy::unnecessary_wraps, reason = "durations are optional")]
    fn ms(millis: u64) -> Option<Duration> {
        Some(Duration::from_millis(millis))
    }

    fn pair() -> Timings {
        Timings {
            received: Tick::from_millis(1000),
            routed: at(1001),
            prefill_start: at(1002),
            prefill_end: at(1100),
            handed_over: at(1101),
            answer_head: at(1150),
            first_chunk: at(1200),
            last_chunk: at(3180),
            ended: at(3181),
        }
    }

    /// R19: the first chunk decides the time to the first token.
    #[test]
    fn r19_ttft_ends_with_the_first_chunk() {
        let durations = Durations::from_moments(&pair(), true, 99);
        let expected = Durations {
            routing: ms(2),
            prefill: ms(98),
            kv_transfer: ms(100),
            ttft: ms(200),
            decode: ms(1980),
            tpot: ms(20),
            total: ms(2181),
        };
        assert_eq!(durations, expected);
    }

    #[test]
    fn a_whole_answer_counts_from_the_prefill_end() {
        let durations = Durations::from_moments(&pair(), false, 99);
        assert_eq!((durations.ttft, durations.decode, durations.tpot), (ms(2180), ms(2080), None));
        let single = Timings { prefill_start: None, prefill_end: None, ..pair() };
        let durations = Durations::from_moments(&single, false, 99);
        assert_eq!((durations.routing, durations.prefill, durations.kv_transfer), (ms(1), None, None));
        assert_eq!(durations.decode, ms(2079));
    }

    #[test]
    fn moments_that_did_not_happen_make_no_duration() {
        let durations = Durations::from_moments(&Timings::default(), true, 5);
        assert_eq!(durations, Durations::default());
        let unended = Timings { prefill_end: None, ..pair() };
        let durations = Durations::from_moments(&unended, true, 0);
        assert_eq!((durations.prefill, durations.kv_transfer, durations.tpot), (None, None, None));
        // Both legs at once: the answer began before the prefill leg ended.
        let overlapping = Timings { prefill_end: at(1300), ..pair() };
        assert_eq!(Durations::from_moments(&overlapping, true, 1).kv_transfer, ms(0));
    }
}
