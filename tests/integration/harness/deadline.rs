//! The last resort against a test that never ends.
//!
//! Waits in the harness have deadlines of their own ([`super::within`]) and fail their test. What a test waits for beside
//! them is caught here: a process that it has started lives longer than any test may take, and then the run ends with the
//! names of the test and of all that is being waited for.

use std::collections::BTreeMap;
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

/// No test takes longer. `TANDEM_TEST_DEADLINE` (seconds) says otherwise, for runs with real engines.
const LONGEST_TEST: Duration = Duration::from_mins(15);
/// How often the watch looks.
const PERIOD: Duration = Duration::from_secs(1);

/// What is going on: what it is, and since when.
static ENTRIES: Mutex<BTreeMap<u64, Entry>> = Mutex::new(BTreeMap::new());

#[derive(Clone, Debug)]
struct Entry {
    text: String,
    since: Instant,
    /// Must be over within the longest time of a test.
    bounded: bool,
}

/// Something that goes on until this is dropped.
#[derive(Debug)]
pub struct Going(u64);

/// A wait with a deadline of its own.
pub fn waiting(what: &str) -> Going {
    enter(format!("waits for: {what}"), false)
}

/// A process that belongs to a test, which is known by the thread that starts it.
pub fn process(name: &str) -> Going {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        std::thread::spawn(watch);
    });
    let thread = std::thread::current();
    enter(format!("{name} of {}", thread.name().unwrap_or("a test")), true)
}

fn enter(text: String, bounded: bool) -> Going {
    let mut entries = ENTRIES.lock().unwrap_or_else(PoisonError::into_inner);
    let number = entries.last_key_value().map_or(0, |(last, _)| last + 1);
    entries.insert(number, Entry { text, since: Instant::now(), bounded });
    Going(number)
}

impl Drop for Going {
    fn drop(&mut self) {
        ENTRIES.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

fn watch() {
    let seconds = std::env::var("TANDEM_TEST_DEADLINE").ok().and_then(|text| text.parse().ok());
    let longest = seconds.map_or(LONGEST_TEST, Duration::from_secs);
    loop {
        std::thread::sleep(PERIOD);
        let entries: Vec<Entry> = ENTRIES.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        if let Some(report) = overdue(&entries, longest, Instant::now()) {
            eprintln!("{report}");
            // No way leads back into a test that waits without a deadline.
            std::process::exit(101);
        }
    }
}

/// What to say when something has gone on for too long.
fn overdue(entries: &[Entry], longest: Duration, now: Instant) -> Option<String> {
    let age = |entry: &Entry| now.saturating_duration_since(entry.since);
    let late = entries.iter().find(|entry| entry.bounded && age(entry) > longest)?;
    let lines: Vec<String> =
        entries.iter().map(|entry| format!("  {} (for {} s)", entry.text, age(entry).as_secs())).collect();
    Some(format!("{} goes on for more than {longest:?}; at work:\n{}", late.text, lines.join("\n")))
}

#[test]
fn a_test_that_hangs_is_named_with_what_it_waits_for() {
    let start = Instant::now();
    let entry = |text: &str, bounded| Entry { text: text.to_owned(), since: start, bounded };
    let entries = [entry("tandem of a::test", true), entry("waits for: an answer", false)];
    let limit = Duration::from_secs(10);
    assert_eq!(overdue(&entries, limit, start + limit), None);
    assert_eq!(overdue(&entries[1..], limit, start + 2 * limit), None, "has a deadline of its own");
    let report = overdue(&entries, limit, start + 2 * limit).expect("a report");
    assert!(report.starts_with("tandem of a::test goes on") && report.contains("waits for: an answer (for 20 s)"));
}
