// Package webhook answers the API server, which asks it about new pods: it gives them their disks
// by package admission.
//
// The certificate is made here and needs no operator. It is in one Secret, which all replicas
// share. A replica that finds it missing or near its end makes a new one. The authority that signed
// it goes into the webhook configurations, together with the previous one, so that replicas may
// change their certificate one after the other. The key of an authority is never kept.
//
// The matchConditions of the configurations, which are in the chart, select only pods with an
// annotation that means this product. So an outage of the controller affects no other pods, and not
// those of the controller itself: it needs no webhook to start.
package webhook
