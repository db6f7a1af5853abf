//! The check that closes every scenario: whatever happened, nothing stays charged.

use std::time::Duration;

use super::engines::Backend;
use super::metrics::Metrics;
use super::tandem::Tandem;

/// How long after the last answer a replica may take to release everything.
pub const QUIET_WITHIN: Duration = Duration::from_secs(1);

/// Gauges that count work in flight.
pub const GAUGES: [&str; 11] = [
    "gateway_in_flight_requests",
    "gateway_model_in_flight_requests",
    "gateway_prefill_outstanding_requests",
    "tandem_pod_prefill_outstanding",
    "tandem_pod_decode_running",
    "tandem_pod_decode_pending",
    "tandem_buffered_bytes",
    "pd_token_load_active_tokens",
    "pd_token_load_kv_tokens",
    "pd_token_load_decode_tokens",
    "tandem_token_load_stranded_tokens",
];

/// Call it when all answers are in and all clients have gone: within [`QUIET_WITHIN`] every gauge of every living
/// replica is 0 and no engine works on anything; and no gauge was ever seen below zero.
pub async fn oracle(tandems: &[Tandem], engines: &[&dyn Backend]) {
    let deadline = tokio::time::Instant::now() + QUIET_WITHIN;
    loop {
        let mut complaints = Vec::new();
        for (index, tandem) in tandems.iter().enumerate().filter(|(_, tandem)| tandem.process().status().is_none()) {
            let metrics = tandem.metrics().await;
            // Without this, a replica that exports nothing would pass.
            assert!(metrics.has(GAUGES[0]), "replica {index} does not export {}", GAUGES[0]);
            complaints.extend(not_zero(&metrics).into_iter().map(|gauge| format!("replica {index}: {gauge}")));
        }
        for engine in engines.iter().filter(|engine| engine.open_requests() > 0) {
            complaints.push(format!("engine {}: {} open requests", engine.address(), engine.open_requests()));
        }
        if complaints.is_empty() {
            break;
        }
        let late = tokio::time::Instant::now() > deadline;
        assert!(!late, "not quiet within {QUIET_WITHIN:?}:\n{}", complaints.join("\n"));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for (index, tandem) in tandems.iter().enumerate() {
        let negative = tandem.negative_gauges();
        assert!(negative.is_empty(), "replica {index}: below zero: {negative:?}");
    }
}

/// The gauges that are not 0, as text.
pub fn not_zero(metrics: &Metrics) -> Vec<String> {
    suspicious(metrics, |value| value != 0.0)
}

/// The gauges below zero (or no number at all), as text.
pub fn below_zero(metrics: &Metrics) -> Vec<String> {
    suspicious(metrics, |value| value < 0.0 || value.is_nan())
}

fn suspicious(metrics: &Metrics, wrong: impl Fn(f64) -> bool) -> Vec<String> {
    let samples = GAUGES.iter().flat_map(|gauge| metrics.matching(gauge, &[]));
    samples.filter(|sample| wrong(sample.value)).map(|s| format!("{}{:?} = {}", s.name, s.labels, s.value)).collect()
}

#[test]
fn complains_about_what_is_left_and_what_is_negative() {
    let page = "gateway_in_flight_requests{gateway_pod=\"a\"} 0\ntandem_pod_decode_running{pod=\"x\"} 2\n\
                tandem_pod_decode_pending{pod=\"x\"} -1\ntandem_buffered_bytes NaN\nother 7\n";
    let metrics = Metrics::parse(page).unwrap();
    assert_eq!(not_zero(&metrics).len(), 3);
    assert_eq!(below_zero(&metrics).len(), 2);
    assert!(not_zero(&Metrics::parse("gateway_in_flight_requests 0\n").unwrap()).is_empty());
}
