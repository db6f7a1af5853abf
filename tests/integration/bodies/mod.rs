//! What happens to bytes on their way: request bodies on both legs, answers on the way back, and the usage that is read
//! from them. Each scenario runs through real Envoy and through the HTTP front.

pub mod members;

mod answers;
mod corpus;
mod errors;
mod fidelity;
mod fields;
mod sizes;
mod text;
mod usage;

use crate::harness::engines::Sandbox;
use crate::harness::fleet::Fleet;
use crate::harness::{SOON, eventually};

/// The sum of a metric over all replicas.
pub async fn total(fleet: &Fleet, name: &str, labels: &[(&str, &str)]) -> f64 {
    let mut sum = 0.0;
    for tandem in &fleet.tandems {
        sum += tandem.metrics().await.sum(name, labels);
    }
    sum
}

/// Waits until that sum is `expected`: a request is counted at its end, which may come just after its last byte.
pub async fn wait_total(fleet: &Fleet, name: &str, labels: &[(&str, &str)], expected: f64) {
    let what = format!("{name}{labels:?} = {expected}");
    let sum = async || (total(fleet, name, labels).await == expected).then_some(());
    eventually(SOON, &what, sum).await;
}

/// No replica has panicked, however well it survived it.
pub async fn assert_no_panic(sandbox: &Sandbox) {
    assert_eq!(total(&sandbox.fleet, "tandem_panics_caught_total", &[]).await, 0.0);
    for tandem in &sandbox.fleet.tandems {
        let logs = tandem.process().stdout() + &tandem.process().stderr();
        assert!(!logs.contains("panicked"), "{}", tandem.process().logs());
    }
}
