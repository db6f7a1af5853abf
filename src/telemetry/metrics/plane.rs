//! The state plane in metrics.

use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, Registry};

use super::Metrics;
use crate::telemetry::names::{GATEWAY_POD, HistogramDefinition, Metric, SYNC_SECONDS, VIEW_AGE_SECONDS};

/// How a sync of a ledger ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncOutcome {
    /// It was answered.
    Done,
    /// It was not answered in time.
    Late,
    /// It failed.
    Failed,
}

/// Why a claim was given up and its request went on as if paced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimFallback {
    /// No answer within the deadline.
    Late,
    /// The call failed.
    Failed,
    /// This replica is no member of the ledger, or is reading it anew.
    NotMember,
    /// A later call came first, or the ledger is another one.
    Overtaken,
    /// Too many claims wait already.
    QueueFull,
    /// The decision was made again as often as the deadline allows.
    TooOften,
}

impl ClaimFallback {
    const ALL: [ClaimFallback; 6] = [
        ClaimFallback::Late,
        ClaimFallback::Failed,
        ClaimFallback::NotMember,
        ClaimFallback::Overtaken,
        ClaimFallback::QueueFull,
        ClaimFallback::TooOften,
    ];

    fn label(self) -> &'static str {
        match self {
            ClaimFallback::Late => "late",
            ClaimFallback::Failed => "failed",
            ClaimFallback::NotMember => "not_member",
            ClaimFallback::Overtaken => "overtaken",
            ClaimFallback::QueueFull => "queue_full",
            ClaimFallback::TooOften => "too_often",
        }
    }
}

/// One model's ledger, for the metrics.
#[derive(Clone, Debug, Default)]
pub struct PlaneGauge {
    /// The model.
    pub model: std::sync::Arc<str>,
    /// How old the view of the others is; `None` = there never was one.
    pub staleness: Option<Duration>,
    /// Members of the ledger.
    pub members: u64,
    /// Claims are made.
    pub claiming: bool,
    /// Pods published since the start.
    pub published: u64,
    /// Pods received since the start.
    pub received: u64,
    /// Times that the view was read anew.
    pub resyncs: u64,
    /// Shares of dead members taken away by this replica.
    pub reaped: u64,
    /// Announcements that were missed.
    pub gaps: u64,
    /// Times that this replica became a member.
    pub joins: u64,
}

/// The distributions that people ask quantiles of.
#[derive(Debug)]
pub(super) struct PlaneHistograms {
    sync: Histogram,
    view_age: Histogram,
}

impl PlaneHistograms {
    pub(super) fn new(registry: &Registry, gateway_pod: &str) -> PlaneHistograms {
        PlaneHistograms {
            sync: histogram(registry, gateway_pod, &SYNC_SECONDS),
            view_age: histogram(registry, gateway_pod, &VIEW_AGE_SECONDS),
        }
    }
}

fn histogram(registry: &Registry, gateway_pod: &str, definition: &HistogramDefinition) -> Histogram {
    let options = |buckets: &[f64]| {
        HistogramOpts::new(definition.name, definition.help)
            .const_label(GATEWAY_POD, gateway_pod)
            .buckets(buckets.to_vec())
    };
    let registered = Histogram::with_opts(options(definition.buckets)).and_then(|histogram| {
        registry.register(Box::new(histogram.clone()))?;
        Ok(histogram)
    });
    match registered {
        Ok(histogram) => histogram,
        Err(error) => {
            tracing::error!(metric = definition.name, %error, "metric cannot be exported");
            // A histogram of one bucket cannot be wrong.
            Histogram::with_opts(options(&[1.0])).unwrap_or_else(|_| unreachable!())
        }
    }
}

impl Metrics {
    pub(super) fn begin_plane(&self) {
        for outcome in ["done", "late", "failed"] {
            self.series(Metric::PlaneSyncs, &[outcome]);
        }
        for direction in ["told", "heard"] {
            self.series(Metric::Findings, &[direction]);
        }
        for outcome in ["granted", "again"] {
            self.series(Metric::Claims, &[outcome]);
        }
        for fallback in ClaimFallback::ALL {
            self.series(Metric::ClaimFallbacks, &[fallback.label()]);
        }
    }

    /// A sync ended after so long.
    pub fn synced(&self, outcome: SyncOutcome, took: Duration) {
        let outcome = match outcome {
            SyncOutcome::Done => "done",
            SyncOutcome::Late => "late",
            SyncOutcome::Failed => "failed",
        };
        self.count(Metric::PlaneSyncs, &[outcome], 1);
        self.plane.sync.observe(took.as_secs_f64());
    }

    /// So many findings were told to other replicas.
    pub fn findings_told(&self, count: u64) {
        self.count(Metric::Findings, &["told"], count);
    }

    /// So many findings of other replicas were heard.
    pub fn findings_heard(&self, count: u64) {
        self.count(Metric::Findings, &["heard"], count);
    }

    /// So many findings were lost.
    pub fn findings_dropped(&self, count: u64) {
        self.count(Metric::FindingsDropped, &[], count);
    }

    /// A claim was answered: granted, or to be decided again.
    pub fn claimed(&self, granted: bool) {
        self.count(Metric::Claims, &[if granted { "granted" } else { "again" }], 1);
    }

    /// A request went on without its claim.
    pub fn claim_fell_back(&self, why: ClaimFallback) {
        self.count(Metric::ClaimFallbacks, &[why.label()], 1);
    }

    /// The breaker of the claims has opened.
    pub fn claims_stopped(&self) {
        self.count(Metric::ClaimsStopped, &[], 1);
    }

    /// A selection was made on a view of the others that was so old.
    pub fn selected_on_view(&self, age: Duration) {
        self.plane.view_age.observe(age.as_secs_f64());
    }

    /// The state of the plane; called before an exposition.
    pub fn set_plane(&self, connected: bool, [sent, received]: [u64; 2], models: &[PlaneGauge]) {
        self.series(Metric::PlaneConnected, &[]).set(u64::from(connected));
        self.series(Metric::PlaneBytes, &["sent"]).set(sent);
        self.series(Metric::PlaneBytes, &["received"]).set(received);
        for gauge in models {
            let model: &[&str] = &[&gauge.model];
            let staleness = gauge.staleness.map_or(f64::INFINITY, |age| age.as_secs_f64());
            self.series(Metric::PlaneStaleness, model).set_decimal(staleness);
            for (metric, value) in [
                (Metric::PlaneMembers, gauge.members),
                (Metric::PlaneClaiming, u64::from(gauge.claiming)),
                (Metric::PlanePublished, gauge.published),
                (Metric::PlaneReceived, gauge.received),
                (Metric::PlaneResyncs, gauge.resyncs),
                (Metric::PlaneReaped, gauge.reaped),
                (Metric::PlaneGaps, gauge.gaps),
                (Metric::PlaneJoins, gauge.joins),
            ] {
                self.series(metric, model).set(value);
            }
        }
        let there = |model: &str| models.iter().any(|gauge| &*gauge.model == model);
        for metric in Metric::PLANE_BY_MODEL {
            if let Some(family) = self.families.get(*metric as usize) {
                family.retain_by("model", there);
            }
        }
    }
}
