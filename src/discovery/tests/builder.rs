use std::sync::{Arc, Mutex};

use crate::discovery::{Departed, DepartedListener, FleetBuilder};
use crate::fleet::fixture::spec;
use crate::fleet::{Fleet, PodSpec};

fn recording() -> (FleetBuilder, Arc<Mutex<Vec<Departed>>>) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let listener: DepartedListener = {
        let heard = Arc::clone(&heard);
        Arc::new(move |gone: &[Departed]| heard.lock().unwrap().extend_from_slice(gone))
    };
    (FleetBuilder::new(Arc::new(Fleet::default()), vec![listener]), heard)
}

#[test]
fn tells_which_incarnations_are_gone() {
    let (builder, heard) = recording();
    let versions = builder.subscribe();
    assert!(!builder.primed());
    let first = builder.apply(vec![spec("a"), spec("b")]);
    assert!(builder.primed() && first.changed && first.departed.is_empty());
    let second = builder.apply(vec![PodSpec { restarts: 1, ..spec("a") }]);
    let shown: Vec<(u32, &str, bool)> =
        second.departed.iter().map(|gone| (gone.slot, &*gone.key.name, gone.name_gone)).collect();
    assert_eq!(shown, [(0, "a", false), (1, "b", true)]);
    assert_eq!(*heard.lock().unwrap(), second.departed);
    assert_eq!((*versions.borrow(), builder.fleet().load().version), (2, 2));
}

#[test]
fn equal_specs_build_nothing() {
    let (builder, _) = recording();
    builder.apply(vec![spec("a")]);
    let snapshot = builder.fleet().load();
    let again = builder.apply(vec![spec("a")]);
    assert!(!again.changed);
    assert!(Arc::ptr_eq(&snapshot, &builder.fleet().load()));
    let empty = FleetBuilder::new(Arc::new(Fleet::default()), Vec::new());
    assert!(empty.apply(Vec::new()).changed, "an empty fleet is news the first time");
    assert!(empty.primed());
}

#[test]
fn a_listener_may_read_the_new_fleet() {
    let fleet = Arc::new(Fleet::default());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let listener: DepartedListener = {
        let (fleet, seen) = (Arc::clone(&fleet), Arc::clone(&seen));
        Arc::new(move |_: &[Departed]| seen.lock().unwrap().push(fleet.load().version))
    };
    let builder = FleetBuilder::new(fleet, vec![listener]);
    builder.apply(vec![spec("a")]);
    builder.apply(vec![]);
    assert_eq!(*seen.lock().unwrap(), [2]);
}

#[test]
fn problems_are_bounded_and_on_one_line() {
    let (builder, _) = recording();
    builder.set_problems((0..500).map(|i| format!("{i}\n\u{1b}[31m{}", "é".repeat(2000))).collect());
    let problems = builder.problems();
    assert_eq!((problems.texts.len(), problems.omitted), (200, 300));
    assert!(problems.texts.iter().all(|text| text.chars().count() <= 403 && !text.contains(['\n', '\u{1b}'])));
    builder.set_problems(Vec::new());
    assert_eq!(builder.problems(), crate::discovery::ProblemList::default());
}
