//! Data-parallel pods: one endpoint for each rank, on the port of the first plus the rank. Pure.
//!
//! An endpoint is an entry of the fleet like any pod's engine, `pod/port`, so that whatever is kept of a pod (loads, health,
//! signals, what replicas tell one another, sessions, prefixes) is kept of each rank. Rank 0 is the pod itself.

use std::sync::Arc;

use super::containers::{ContainerStatus, Endpoint, PodTemplate};
use super::manifest::Problems;
use crate::fleet::{Engine, PodKey, PodSpec};

/// The pod's engines, ordered by rank. `pod` is what they have in common.
pub(super) fn expand(
    pod: &PodSpec,
    template: &PodTemplate,
    statuses: &[ContainerStatus],
    main: Option<&str>,
    problems: &mut Problems,
) -> Vec<PodSpec> {
    let (mut ranks, odd) = template.ranks();
    if let Some(text) = odd {
        problems.add(format_args!("{text}"));
    }
    let room = u16::MAX - pod.port;
    if ranks - 1 > room {
        ranks = room + 1;
        problems.add(format_args!("the ports of its data-parallel ranks end at {}; {ranks} ranks are used", u16::MAX));
    }
    (0..ranks)
        .map(|rank| PodSpec { restarts: restarts(pod, template, statuses, main, ranks, rank), ..at(pod, rank) })
        .collect()
}

fn restarts(
    pod: &PodSpec,
    template: &PodTemplate,
    statuses: &[ContainerStatus],
    main: Option<&str>,
    ranks: u16,
    rank: u16,
) -> u32 {
    template.restarts(statuses, main, Endpoint { port: pod.port + rank, base: pod.port, alone: ranks == 1 })
}

/// The pod's endpoint of that rank. Where metrics are on the serving port they move with it. So does SGLang's bootstrap
/// server, since two servers of one pod cannot listen on one port; vLLM's Mooncake server is one for all ranks.
fn at(pod: &PodSpec, rank: u16) -> PodSpec {
    if rank == 0 {
        return pod.clone();
    }
    let port = pod.port + rank;
    let bootstrap = if pod.engine == Engine::Sglang { rank } else { 0 };
    PodSpec {
        key: PodKey { namespace: Arc::clone(&pod.key.namespace), name: Arc::from(format!("{}/{port}", pod.key.name)) },
        uid: Arc::from(format!("{}/{port}", pod.uid)),
        port,
        metric_port: if pod.metric_port == pod.port { port } else { pod.metric_port },
        bootstrap_port: pod.bootstrap_port.saturating_add(bootstrap),
        rank,
        ..pod.clone()
    }
}
