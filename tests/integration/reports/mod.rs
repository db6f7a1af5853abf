//! What users of gateways like this one have reported, one kind of report in each file. Through real Envoy, with the
//! shipped file where Envoy matters.

mod body_sizes;
mod codings;
mod conventions;
mod credentials;
mod cross_origin;
mod endpoints;
mod kv_identity;
mod non_text;
mod reasoning;
mod refusals;
mod responses;
mod scale_to_zero;
mod usage_by_api;
