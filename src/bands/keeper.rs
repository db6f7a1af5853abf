//! The one writer: takes observations in, lets them fade, and plans anew when it is time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::groups::{Question, questions};
use super::layout::Layout;
use super::plan::{Plan, borders};
use super::sketch::{Bins, Increments, Picture};
use super::{ModelBands, ProfilePlan};
use crate::clock::Tick;
use crate::fleet::{Model, Snapshot};
use crate::knobs::PdKnobs;

/// A plan is looked at again after this time, or when its rolesets change (reference section 4.13).
pub const PLAN_AGE: Duration = Duration::from_secs(5);

/// Keeps the bands of every model of a fleet.
#[derive(Debug, Default)]
pub struct Keepers {
    models: HashMap<Arc<str>, Keeper>,
}

impl Keepers {
    /// Brings every model with pods of its own up to date. To be called about once a second.
    pub fn refresh(&mut self, snapshot: &Snapshot, gateway: &PdKnobs, now: Tick) {
        self.models
            .retain(|name, keeper| snapshot.home(name).is_some_and(|model| Arc::ptr_eq(&model.bands, &keeper.bands)));
        for model in snapshot.homes() {
            let keeper =
                self.models.entry(Arc::clone(&model.name)).or_insert_with(|| Keeper::new(Arc::clone(&model.bands)));
            keeper.refresh(model, gateway, now);
        }
    }
}

/// Keeps the bands of one model.
#[derive(Debug)]
pub struct Keeper {
    bands: Arc<ModelBands>,
    picture: Option<Picture>,
    /// Counters of the layout before, for observations that were under way when it was replaced.
    retired: Option<Arc<Bins>>,
    watched: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    question: Question,
    plan: Option<Arc<Plan>>,
    planned_at: Tick,
}

impl Keeper {
    /// The keeper of these bands; there must be one only.
    pub fn new(bands: Arc<ModelBands>) -> Keeper {
        Keeper { bands, picture: None, retired: None, watched: Vec::new() }
    }

    /// What was observed since the last refresh, here and by other replicas: drain, decay, replan, publish. `model` must be the one that the bands belong to.
    pub fn refresh(&mut self, model: &Model, gateway: &PdKnobs, now: Tick) {
        let questions = questions(model, gateway);
        if questions.is_empty() {
            if self.picture.is_some() {
                self.bands.sketch.replace(None);
                self.bands.publish(Vec::new());
                *self = Keeper::new(Arc::clone(&self.bands));
            }
            return;
        }
        let mut increments = Increments::default();
        if let Some(retired) = self.retired.take() {
            retired.drain_into(&mut increments);
        }
        self.bands.sketch.drain_into(&mut increments);
        let changed = !self.watched.iter().map(|watched| &watched.question).eq(&questions);
        let mut picture = match self.picture.take() {
            Some(picture) if !changed => picture,
            earlier => {
                let layout = Layout::new(questions.iter().flat_map(|question| borders(&question.groups)));
                match earlier {
                    Some(picture) if **picture.layout() == layout => picture,
                    earlier => {
                        let layout = Arc::new(layout);
                        self.retired = self.bands.sketch.replace(Some(Arc::new(Bins::new(Arc::clone(&layout)))));
                        earlier.map_or_else(
                            || Picture::empty(Arc::clone(&layout), now),
                            |picture| picture.in_layout(Arc::clone(&layout)),
                        )
                    }
                }
            }
        };
        picture.decay(now);
        picture.absorb(&increments);
        self.bands.told.keep(&increments);
        for observed in self.bands.told.heard() {
            picture.absorb_old(&observed.increments, observed.age);
        }
        let mut earlier = std::mem::take(&mut self.watched);
        self.watched = questions
            .into_iter()
            .map(|question| {
                let known = earlier.iter().position(|watched| watched.question.profile == question.profile);
                let known = known.map(|position| earlier.swap_remove(position));
                watch(question, known, &picture, now)
            })
            .collect();
        self.picture = Some(picture);
        let live = self.watched.iter().filter_map(|watched| {
            let plan = Arc::clone(watched.plan.as_ref()?);
            Some(ProfilePlan { profile: watched.question.profile.clone(), plan })
        });
        self.bands.publish(live.collect());
    }
}

/// The plan for a question: the one that is there, unless it is old and a new one would be better.
fn watch(question: Question, known: Option<Watched>, picture: &Picture, now: Tick) -> Watched {
    let known = known.filter(|known| known.question == question);
    if let Some(known) = known {
        // Without a plan there is nothing to disturb, so that it need not wait.
        if known.plan.is_some() && now.since(known.planned_at) < PLAN_AGE {
            return known;
        }
        let fresh = Plan::new(&question.groups, question.mode, picture);
        let plan = match (known.plan, fresh) {
            (Some(old), Some(fresh)) if old.still_good(&fresh, picture) => Some(old),
            (_, fresh) => fresh.map(Arc::new),
        };
        return Watched { question, plan, planned_at: now };
    }
    let plan = Plan::new(&question.groups, question.mode, picture).map(Arc::new);
    Watched { question, plan, planned_at: now }
}
