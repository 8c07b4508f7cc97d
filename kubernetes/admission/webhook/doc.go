// Package webhook answers the API server about new pods: it gives them their disks by package
// admission.
//
// The chart makes the certificate, in one Secret that all replicas mount, and writes its authority
// into the webhook configurations. So the controller's account needs no right to change these: with
// its token alone, an attacker cannot direct the API server to another webhook.
//
// The matchConditions of the configurations, which are in the chart, select only pods with an
// annotation for this product. So an outage of the controller affects no other pods, nor those of
// the controller itself, which can start without a webhook.
package webhook
