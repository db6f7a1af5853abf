//! The age of a hand-off: the blocks that it names are another prompt's after their lease.

use super::*;

/// Feeds timers, each when it is wanted, until `at` milliseconds.
fn look_until(run: &mut Run, at: u64) {
    while let Some(next) = run.exchange.deadline().filter(|next| *next <= Tick::from_millis(at)) {
        run.exchange.on(next, Event::Timer, &mut run.effects);
    }
    run.now = at;
}

/// How often the request was prefilled when its answer comes at once after all of `times`: (until when the task looks in
/// time, when it looks next). The deadline is that of the defaults, 20 s.
fn prefills(times: &[(u64, u64)]) -> usize {
    let mut run = Run::new(world());
    run.feed(head(PD)).feed(body(BODY));
    for (until, next) in times {
        look_until(&mut run, *until);
        run.now = *next;
        run.exchange.on(Tick::from_millis(*next), Event::Timer, &mut run.effects);
    }
    run.feed(prefill_ok());
    let prefills = run.names().iter().filter(|name| **name == "prefill").count();
    // What the engines have closed meanwhile is not used for the second one.
    assert_eq!(run.names().contains(&"forget"), prefills == 2, "{:?}", run.names());
    if prefills == 1 {
        assert!(run.names().contains(&"route"), "{:?}", run.names());
    } else {
        // The second hand-off is fresh.
        assert!(!run.names().contains(&"route"), "{:?}", run.names());
        run.feed(prefill_ok());
        assert!(run.names().contains(&"route"), "{:?}", run.names());
    }
    run.feed(Event::Gone);
    run.oracle();
    prefills
}

#[test]
fn an_answer_that_lay_in_the_socket_while_the_process_was_stopped_is_not_used() {
    // A prefill that takes long is no reason for mistrust.
    assert_eq!(prefills(&[]), 1);
    assert_eq!(prefills(&[(100_000, 100_500)]), 1);
    // Stopped for less than the deadline, and for more. The first thing that happens afterwards is the timer.
    assert_eq!(prefills(&[(3_000, 20_000)]), 1);
    assert_eq!(prefills(&[(3_000, 24_000)]), 2);
    assert_eq!(prefills(&[(3_000, 600_000)]), 2);
    // An answer which is not there half a second after the stop was not there before it either.
    assert_eq!(prefills(&[(3_000, 600_000), (600_500, 601_000)]), 1);
}
