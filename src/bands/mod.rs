//! Adaptive bucket serving: which roleset a prompt of some length should go to, so that rolesets with overlapping
//! ranges carry equal load per replica.
//!
//! [`Sketch`] counts the lengths that are routed, [`Keeper`] turns them into a fading [`Picture`] and that into a
//! [`Plan`] per profile, and routing looks a length up in [`ModelBands`]. A plan divides the picture as well as the
//! ranges allow, exactly; see `docs/decisions/006-bands.md`.
//!
//! Promises: observing and looking up take no lock and allocate nothing; no group gets a length outside its range;
//! the same picture and rolesets give the same plan; time comes in as an argument.

mod fair;
mod groups;
mod keeper;
mod layout;
mod plan;
mod sketch;
#[cfg(test)]
mod tests;
mod told;

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};

use crate::fleet::Snapshot;

pub use groups::{MAX_PROFILES, enabled, groups};
pub use keeper::{Keeper, Keepers, PLAN_AGE};
pub use layout::Layout;
pub use plan::{BandView, Banded, Group, Plan, borders};
pub use sketch::{HALF_LIFE, Increments, Picture, Sketch, Tally};
pub use told::Observed;

/// The longest prompt of each roleset that a live plan of the fleet holds, tokens; `u64::MAX` = no end.
pub fn ends(snapshot: &Snapshot) -> BTreeMap<Arc<str>, u64> {
    let mut ends = BTreeMap::new();
    for model in snapshot.homes() {
        for live in model.bands.plans().iter() {
            for band in live.plan.bands() {
                let end = ends.entry(Arc::clone(band.roleset)).or_insert(band.max);
                *end = band.max.max(*end);
            }
        }
    }
    ends
}

/// The plan of one profile.
#[derive(Clone, Debug)]
pub struct ProfilePlan {
    /// The profile's name; `None` for requests to which no profile applies.
    pub profile: Option<Arc<str>>,
    /// Its plan.
    pub plan: Arc<Plan>,
}

/// What a model knows about prompt lengths. Survives snapshots.
#[derive(Debug, Default)]
pub struct ModelBands {
    sketch: Sketch,
    told: told::Told,
    plans: ArcSwap<Vec<ProfilePlan>>,
}

impl ModelBands {
    /// Notes that a request of so many prompt tokens went to a roleset. Does nothing while no profile has the feature
    /// on.
    pub fn observe(&self, tokens: u64) {
        self.sketch.observe(tokens);
    }

    /// True when observations are kept.
    pub fn is_on(&self) -> bool {
        self.sketch.is_on()
    }

    /// From now on somebody tells other replicas what is observed here.
    pub fn share(&self) {
        self.told.begin();
    }

    /// What was observed here since this was last asked, for the other replicas.
    pub fn take_observed(&self) -> Option<Increments> {
        self.told.take()
    }

    /// What another replica observed; the next plan counts it in.
    pub fn hear(&self, observed: Observed) {
        self.told.hear(observed);
    }

    /// The live plans, ordered by profile.
    pub fn plans(&self) -> Guard<Arc<Vec<ProfilePlan>>> {
        self.plans.load()
    }

    /// The roleset of a prompt of so many tokens under a profile, by the live plan.
    pub fn roleset(&self, profile: Option<&str>, tokens: u64, seed: u64) -> Option<Arc<str>> {
        let plans = self.plans.load();
        let plan = plans.iter().find(|live| live.profile.as_deref() == profile)?;
        plan.plan.band(tokens, seed).map(|band| Arc::clone(band.roleset))
    }

    fn publish(&self, plans: Vec<ProfilePlan>) {
        let same =
            |old: &ProfilePlan, new: &ProfilePlan| old.profile == new.profile && Arc::ptr_eq(&old.plan, &new.plan);
        let live = self.plans.load();
        if live.len() != plans.len() || !live.iter().zip(&plans).all(|(old, new)| same(old, new)) {
            self.plans.store(Arc::new(plans));
        }
    }
}
