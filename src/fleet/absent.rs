//! Models that are known and of which there is no pod: their pods went a while ago, or a workload without replicas names
//! them.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::clock::Tick;

/// Models remembered at most; beyond, those whose time is over first go.
pub const MAX_ABSENT: usize = 1024;

/// Until when each is known; `None` = as long as its workload is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Absent {
    until: HashMap<Arc<str>, Option<Tick>>,
}

impl Absent {
    /// The model of that name, if it is known.
    pub fn get(&self, name: &str, now: Tick) -> Option<Arc<str>> {
        let (name, until) = self.until.get_key_value(name)?;
        until.is_none_or(|until| now < until).then(|| Arc::clone(name))
    }

    /// Those that are known, in no particular order.
    pub fn names(&self, now: Tick) -> impl Iterator<Item = &Arc<str>> {
        self.until.iter().filter(move |(_, until)| until.is_none_or(|until| now < until)).map(|(name, _)| name)
    }

    /// The next state: `gone` have just lost their last pod and are known until `until`; `workloads` are known as long as
    /// they are listed; those that are `served` have pods.
    #[must_use]
    pub fn next(
        &self,
        gone: impl IntoIterator<Item = Arc<str>>,
        workloads: &BTreeSet<Arc<str>>,
        served: impl Fn(&str) -> bool,
        (now, until): (Tick, Tick),
    ) -> Absent {
        let remembered = self.until.iter().filter_map(|(name, until)| Some((Arc::clone(name), (*until)?)));
        // A model without workload is remembered from then on.
        let dropped = self.until.iter().filter(|(_, until)| until.is_none()).map(|(name, _)| (Arc::clone(name), until));
        let gone = gone.into_iter().map(|name| (name, until));
        let mut all: HashMap<Arc<str>, Option<Tick>> = remembered
            .chain(dropped)
            .chain(gone)
            .filter(|(name, until)| now < *until && !served(name))
            .map(|(name, until)| (name, Some(until)))
            .collect();
        all.extend(workloads.iter().filter(|name| !served(name)).map(|name| (Arc::clone(name), None)));
        if all.len() > MAX_ABSENT {
            let mut order: Vec<(Arc<str>, Option<Tick>)> = all.into_iter().collect();
            order.sort_by_key(|(name, until)| {
                (std::cmp::Reverse(until.map_or(u64::MAX, |until| until.0)), Arc::clone(name))
            });
            order.truncate(MAX_ABSENT);
            all = order.into_iter().collect();
        }
        Absent { until: all }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60_000;

    fn name(text: &str) -> Arc<str> {
        Arc::from(text)
    }

    #[test]
    fn a_model_is_remembered_until_its_time_is_over_or_it_has_pods_again() {
        let at = |minute: u64| (Tick::from_millis(minute * MINUTE), Tick::from_millis((minute + 10) * MINUTE));
        let none = BTreeSet::new();
        let first = Absent::default().next([name("a"), name("b")], &none, |_| false, at(0));
        for (minute, known) in [(0, true), (9, true), (10, false), (60, false)] {
            assert_eq!(first.get("a", at(minute).0).is_some(), known, "{minute}");
        }
        assert_eq!(first.get("c", at(0).0), None);
        let back = first.next([], &none, |name| name == "a", at(5));
        assert_eq!((back.get("a", at(5).0), back.get("b", at(5).0)), (None, Some(name("b"))));
        assert!(back.next([], &none, |_| false, at(10)).names(at(10).0).next().is_none());
    }

    #[test]
    fn a_workload_is_known_as_long_as_it_is_there_and_then_remembered() {
        let at = |minute: u64| (Tick::from_millis(minute * MINUTE), Tick::from_millis((minute + 10) * MINUTE));
        let workloads = BTreeSet::from([name("w")]);
        let first = Absent::default().next([], &workloads, |_| false, at(0));
        assert!(first.get("w", at(1000).0).is_some());
        let gone = first.next([], &BTreeSet::new(), |_| false, at(100));
        assert_eq!((gone.get("w", at(109).0).is_some(), gone.get("w", at(110).0)), (true, None));
    }

    #[test]
    fn it_is_bounded_and_the_longest_known_stay() {
        let (early, late) = ((Tick(0), Tick(10)), (Tick(1), Tick(20)));
        let many = |from: usize, to: usize| (from..to).map(|number| name(&format!("m{number}")));
        let first = Absent::default().next(many(0, MAX_ABSENT), &BTreeSet::new(), |_| false, early);
        let next = first.next(many(MAX_ABSENT, MAX_ABSENT + 10), &BTreeSet::from([name("w")]), |_| false, late);
        assert_eq!(next.names(Tick(2)).count(), MAX_ABSENT);
        assert!(
            next.get("w", Tick(2)).is_some()
                && many(MAX_ABSENT, MAX_ABSENT + 10).all(|name| next.get(&name, Tick(2)).is_some())
        );
    }
}
