//! Whom a selection keeps away from because of its health, at one moment.
//!
//! Costs two loads while nothing of the model is ejected.

use std::sync::Arc;

use super::explain::DESCRIBED;
use super::{Considered, Context, Decision, Fate, Target, decode, prefill};
use crate::clock::Tick;
use crate::fleet::{Model, Pod};
use crate::load::{Health, Probes};

/// Ejected pods that an explanation names on one side at most; the places of the worst candidates.
const NAMED: usize = 4;

/// Pods and pairs that get no request now, by slot and in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Exclusions {
    pods: Vec<u32>,
    pairs: Vec<(u32, u32)>,
}

impl Exclusions {
    /// Looks at the whole model, unless it is known that nothing of it is ejected. A look that finds nothing settles
    /// that for the snapshot.
    pub(super) fn look(model: &Model, now: Tick) -> Exclusions {
        if model.pairs.quiet(&model.settled) {
            return Exclusions::default();
        }
        // Read before looking: what is ejected meanwhile is not settled.
        let ejections = model.pairs.ejections();
        let (pairs, mut any) = model.pairs.excluded(now);
        let mut pods = Vec::new();
        for pod in &model.routable {
            any |= pod.state.health.ejected();
            if pod.state.health.excluded(now) {
                pods.push(pod.state.slot);
            }
        }
        if !any {
            model.pairs.settle(&model.settled, ejections);
        }
        pods.sort_unstable();
        Exclusions { pods, pairs }
    }

    /// Nobody is left out.
    pub(super) fn is_empty(&self) -> bool {
        self.pods.is_empty() && self.pairs.is_empty()
    }

    /// Whether some pair is left out.
    pub(super) fn any_pair(&self) -> bool {
        !self.pairs.is_empty()
    }

    /// Whether the pod is left out.
    pub(super) fn pod(&self, pod: &Pod) -> bool {
        !self.pods.is_empty() && self.pods.binary_search(&pod.state.slot).is_ok()
    }

    /// Whether the two are left out as a pair.
    pub(super) fn pair(&self, prefill: u32, decode: u32) -> bool {
        !self.pairs.is_empty() && self.pairs.binary_search(&(prefill, decode)).is_ok()
    }
}

/// Pods that would have been candidates, had they not been ejected.
#[derive(Clone, Debug, Default)]
pub(super) struct LeftOut {
    pub(super) prefills: Vec<Arc<Pod>>,
    /// Decode pods, and pods for everything.
    pub(super) decodes: Vec<Arc<Pod>>,
}

/// Adds what health has to do with a decision to its explanation.
pub(super) fn explain(decision: &mut Decision, left_out: &LeftOut, pairs: &Exclusions, context: Context<'_>) {
    let explanation = &mut decision.explanation;
    if let Target::Pair { prefill, .. } = &decision.target
        && pairs.any_pair()
    {
        // Those that could not follow the chosen prefill pod, whatever their score.
        let slot = prefill.state.slot;
        explanation
            .decodes
            .iter_mut()
            .filter(|one| pairs.pair(slot, one.slot))
            .for_each(|one| one.fate = Fate::Ejected);
    }
    let ejected = (Fate::Ejected, None);
    add(&mut explanation.prefills, &left_out.prefills, |pod| {
        let count = pod.state.load.total(context.now).prefills;
        prefill::considered(pod, ejected, count, 0, context)
    });
    add(&mut explanation.decodes, &left_out.decodes, |pod| {
        let facts = decode::Facts::read(pod, context);
        let considered = facts.considered(pod, None, decode::Beside::default(), context.now);
        Considered { fate: Fate::Ejected, ..considered }
    });
}

fn add(list: &mut Vec<Considered>, pods: &[Arc<Pod>], considered: impl Fn(&Arc<Pod>) -> Considered) {
    let named = pods.len().min(NAMED);
    list.truncate(DESCRIBED - named);
    list.extend(pods.iter().take(named).map(considered));
}

/// Whose try a decision takes, should it be charged: found before the charge, so that others wait for nothing but a
/// compare-and-swap each.
#[derive(Debug, Default)]
pub(super) struct Tries {
    prefill: Option<Arc<Health>>,
    decode: Option<Arc<Health>>,
    pair: Option<Arc<Health>>,
}

impl Tries {
    pub(super) fn of(decision: &Decision, model: &Model) -> Tries {
        let ejected = |pod: &Pod| pod.state.health.ejected().then(|| Arc::clone(&pod.state.health));
        match &decision.target {
            Target::Single { pod, .. } => Tries { decode: ejected(pod), ..Tries::default() },
            Target::Pair { prefill, decode } => Tries {
                prefill: ejected(prefill),
                decode: ejected(decode),
                pair: model.pairs.get(prefill.state.slot, decode.state.slot).filter(|health| health.ejected()),
            },
        }
    }

    /// Takes them. One that somebody else has, which only a selection without the check and one that ignores ejections
    /// can run into, stays with the other.
    pub(super) fn claim(&self, now: Tick) -> Probes {
        let claim = |health: &Option<Arc<Health>>| health.as_ref().and_then(|health| health.claim(now));
        Probes { prefill: claim(&self.prefill), decode: claim(&self.decode), pair: claim(&self.pair) }
    }
}
