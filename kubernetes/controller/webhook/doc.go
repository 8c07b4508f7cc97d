// Package webhook answers the API server of a cluster that has no MutatingAdmissionPolicy: it gives
// pods their disks by package inject, as the policies of kubernetes/config do elsewhere.
//
// The certificate is made here and needs no operator. It is in one Secret, which all replicas
// share. A replica that finds it missing or near its end makes a new one. The authority that signed
// it goes into the webhook configurations, together with the previous one, so that replicas may
// change their certificate one after the other. The key of an authority is never kept.
//
// The matchConditions of the configurations select only pods with the annotation of a
// VMIdentitySet. So an outage of the controller affects no other pods.
package webhook
