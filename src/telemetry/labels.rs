//! Label sets.

/// The pod label set of the reference gateway (its section 9.1). `gateway_pod` is added by the metrics themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodLabels {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Pod name.
    pub pod: String,
    /// Model name.
    pub model: String,
    /// Engine label.
    pub engine_type: String,
    /// Roleset, or empty.
    pub roleset: String,
    /// `role-name`, or empty.
    pub role: String,
    /// Role replica index, or empty.
    pub role_replica_index: String,
}
