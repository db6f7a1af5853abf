//! All cores at once: selections, ends in every way, the janitor, and snapshots that change underneath.
//!
//! A second in CI; a minute with `TANDEM_SLOW_TESTS=1 cargo test --lib stress`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;

use super::super::fixtures::*;
use super::super::*;
use crate::load::Ledger;
use crate::rng::Rng;

/// Sums over all pods must never exceed what the threads can have open, and end at zero.
#[test]
#[allow(clippy::disallowed_methods, reason = "the run is measured by the real clock, and its length is an option")]
fn stress_charges_leave_no_trace() {
    let slow = std::env::var("TANDEM_SLOW_TESTS").is_ok();
    let length = if slow { Duration::from_mins(1) } else { Duration::from_secs(1) };
    let threads = std::thread::available_parallelism().map_or(4, usize::from).max(4) as u64;
    let model = Builder::new().rolesets(6, 2, 2).build();
    // Another snapshot of the same pods, half of which are not routable in it.
    let mut fewer = model.clone();
    fewer.rolesets.truncate(3);
    let views = [Arc::new(model.clone()), Arc::new(fewer)];
    let current = ArcSwap::from(Arc::clone(&views[0]));
    let (ledger, stop, done) = (Arc::new(Ledger::new()), AtomicBool::new(false), AtomicU64::new(0));
    let at = |step: u64| Tick::from_millis(200_000 + step);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (current, ledger, stop, done) = (&current, &ledger, &stop, &done);
            scope.spawn(move || {
                let (index, mut rng, mut open, mut step) = (index(), Rng::new(thread), Vec::new(), 0);
                while !stop.load(Ordering::Relaxed) {
                    step += 1;
                    let model = current.load_full();
                    let knobs = PdKnobs {
                        prefill_policy: PrefillPolicy::ALL[rng.below(5)],
                        decode_policy: DecodePolicy::ALL[rng.below(4)],
                        token_load_ttl: Duration::from_millis(rng.below(3) as u64 * 20),
                        ..PdKnobs::default()
                    };
                    let request = RequestFacts { prompt_tokens: rng.below(5_000) as u64, ..request() };
                    let context = Context { now: at(step), ..context(&index, step) };
                    let (decision, mut charges) =
                        select_and_charge(&model, &request, Strategy::Pd, &knobs, context).unwrap();
                    if let Target::Pair { prefill, decode } = &decision.target {
                        assert_eq!(prefill.spec.roleset, decode.spec.roleset);
                    }
                    ledger.watch("stress", &mut charges.tokens);
                    open.push(charges);
                    if open.len() > 16 {
                        let mut charges = open.swap_remove(rng.below(open.len()));
                        charges.prefill = None;
                        charges.tokens.prefill_done(at(step));
                        charges.decode.hand_over();
                        match rng.below(4) {
                            0 => charges.decode.complete(),
                            1 => charges.tokens.strand(at(step + 30), at(step)),
                            2 => charges.tokens.touch(at(step)),
                            _ => {}
                        }
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let (current, ledger, stop, views, model) = (&current, &ledger, &stop, &views, &model);
        scope.spawn(move || {
            let start = std::time::Instant::now();
            let mut round = 0;
            while start.elapsed() < length {
                round += 1;
                current.store(Arc::clone(&views[round % 2]));
                ledger.sweep(at(round as u64));
                let mut open = 0;
                for pod in &model.pods {
                    let (load, tokens) = (pod.state.load.view(), pod.state.load.tokens.view());
                    open += load.in_flight();
                    assert!(load.in_flight() < 1 << 20 && tokens.kv < 1 << 40 && tokens.decode < 1 << 40, "{tokens:?}");
                }
                // The pods are read one after the other while charges come and go, hence the room.
                assert!(open <= threads * 18 * 4, "{open} charges with {threads} threads");
                std::thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
        });
    });
    assert!(done.load(Ordering::Relaxed) > 100);
    ledger.sweep(Tick(u64::MAX));
    assert!(ledger.is_empty());
    for pod in &model.pods {
        assert_eq!(pod.state.load.view().in_flight(), 0);
        assert!(pod.state.load.tokens.view().is_zero(), "{:?}", pod.state.load.tokens.view());
        assert_eq!(pod.state.load.tokens.decode_ages(at(1)).0, 0);
    }
}
