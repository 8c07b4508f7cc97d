// Package webhook answers the API server, which asks it about new pods: it gives them their disks
// by package admission.
//
// The chart makes the certificate, in one Secret that all replicas mount, and writes its authority
// into the webhook configurations. So the controller's account has no right over those: whoever has
// its token cannot have the API server ask somebody else.
//
// The matchConditions of the configurations, which are in the chart, select only pods with an
// annotation that means this product. So an outage of the controller affects no other pods, and not
// those of the controller itself: it needs no webhook to start.
package webhook
