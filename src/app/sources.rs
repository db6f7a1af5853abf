//! Where pods come from.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::clock::Clock;
use crate::discovery::kubernetes::{Around, Cluster, Pace};
use crate::discovery::{self, FleetBuilder, POLL_INTERVAL, PodFiles, PodReader, Reading};
use crate::knobs::Knobs;
use crate::telemetry::Metrics;

/// Where pods come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A file or directory of Pod manifests, watched.
    Pods(PathBuf),
    /// An endpoints file of the reference gateway's standalone mode, read once.
    Standalone(PathBuf),
    /// Manifests in memory (quickstart).
    Manifests(String),
    /// The Kubernetes API: that of a kubeconfig, or `None` = that of the surroundings.
    Kubernetes(Option<PathBuf>),
}

/// What sources feed, and what they need.
pub(super) struct Sources {
    pub(super) builder: Arc<FleetBuilder>,
    pub(super) knobs: Arc<Knobs>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) clock: Clock,
    pub(super) seed: u64,
}

impl Sources {
    /// Begins to discover. Files have been read when it returns; a cluster has not.
    pub(super) async fn start(
        self,
        source: &Source,
        background: &TaskTracker,
        stop: &CancellationToken,
    ) -> Result<Option<Arc<Cluster>>> {
        let Sources { builder, knobs, metrics, clock, seed } = self;
        match source {
            Source::Kubernetes(kubeconfig) => {
                let pace = Pace { stall: knobs.kubernetes.stall, relist: knobs.kubernetes.relist, ..Pace::default() };
                let around = Around { builder, base: Arc::clone(&knobs.pd), metrics, clock, seed };
                let kubeconfig = kubeconfig.as_deref();
                let cluster = Cluster::start(kubeconfig, &knobs.kubernetes, pace, around, background, stop).await?;
                return Ok(Some(Arc::new(cluster)));
            }
            Source::Pods(path) => {
                let files = PodFiles::new(path.clone(), Arc::clone(&knobs.pd));
                discovery::watch_files(files, builder, POLL_INTERVAL, background, stop.clone()).await;
            }
            Source::Standalone(path) => {
                builder.apply(discovery::load_endpoints(path)?);
            }
            Source::Manifests(text) => {
                let documents = discovery::read_documents(text);
                let mut reader = PodReader::new(Arc::clone(&knobs.pd));
                let readings: Vec<_> = documents.pods.iter().map(|manifest| reader.read(manifest)).collect();
                let problems = documents.broken.iter().map(ToString::to_string);
                builder.set_problems(
                    problems
                        .chain(
                            readings.iter().flat_map(|read| read.problems.iter().chain(&read.config_problems).cloned()),
                        )
                        .collect(),
                );
                let specs = readings.into_iter().flat_map(Reading::specs).collect();
                builder.apply_all(specs, documents.adapters);
            }
        }
        Ok(None)
    }
}
