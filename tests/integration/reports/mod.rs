//! What users of gateways like this one have reported, one kind of report in each file. Through real Envoy, with the
//! shipped file where Envoy matters.

mod credentials;
mod cross_origin;
mod endpoints;
mod refusals;
mod scale_to_zero;
