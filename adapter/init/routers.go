package guestinit

import (
	"encoding/binary"
	"net"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// event is news from the kernel about a network card and an IPv6 router.
type event struct {
	card int // its number
	// address is an IPv6 address beyond the link that can be used now. nil: the event is about
	// something else.
	address net.IP
	// dns or search are recommended for this time (RFC 8106); 0: not any more.
	dns      []net.IP
	search   []string
	lifetime time.Duration
}

// The router's options about DNS (RFC 8106 5.1, 5.2), and the size of their fixed part.
const (
	optDNS     = 25
	optSearch  = 31
	optFixed   = 8
	optUnit    = 8  // the length of an option is in units of bytes
	userOption = 16 // the size of struct nduseroptmsg
	tentative  = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED
)

func eventsOf(m syscall.NetlinkMessage) []event {
	switch m.Header.Type {
	case unix.RTM_NEWADDR:
		return newAddress(m.Data)
	case unix.RTM_NEWNDUSEROPT:
		return routerOptions(m.Data)
	}
	return nil
}

// newAddress reads a message about an IPv6 address. The kernel pads attributes, and ParseRouteAttr
// panics if the last one is not padded.
func newAddress(b []byte) []event {
	if len(b) < unix.SizeofIfAddrmsg || len(b)%unix.RTA_ALIGNTO != 0 {
		return nil
	}
	m := nl.DeserializeIfAddrmsg(b)
	if m.Family != unix.AF_INET6 || m.Flags&tentative != 0 || m.Scope != unix.RT_SCOPE_UNIVERSE {
		return nil
	}
	attributes, _ := nl.ParseRouteAttr(b[m.Len():]) // none if it is malformed
	for _, a := range attributes {
		if a.Attr.Type == unix.IFA_ADDRESS && len(a.Value) == net.IPv6len {
			return []event{{card: int(m.Index), address: a.Value}}
		}
	}
	return nil
}

// routerOptions reads struct nduseroptmsg and the options after it, which come from the network
// unchanged. Each option is an event. A malformed option ends the list.
func routerOptions(b []byte) (list []event) {
	if len(b) < userOption || b[0] != unix.AF_INET6 {
		return nil
	}
	card := int(binary.NativeEndian.Uint32(b[4:]))
	length := int(binary.NativeEndian.Uint16(b[2:]))
	if length > len(b)-userOption {
		return nil
	}
	for rest := b[userOption : userOption+length]; len(rest) >= optFixed; {
		n := int(rest[1]) * optUnit
		if n == 0 || n > len(rest) {
			break
		}
		value := rest[optFixed:n]
		e := event{card: card,
			lifetime: time.Duration(binary.BigEndian.Uint32(rest[4:])) * time.Second}
		switch rest[0] {
		case optDNS:
			for ; len(value) >= net.IPv6len; value = value[net.IPv6len:] {
				e.dns = append(e.dns, net.IP(value[:net.IPv6len]))
			}
		case optSearch:
			e.search = readNames(value)
		}
		if len(e.dns) > 0 || len(e.search) > 0 {
			list = append(list, e)
		}
		rest = rest[n:]
	}
	return list
}

// watch follows what the kernel learns from IPv6 routers. It returns only if that fails.
func (n *network) watch(kernel *nl.NetlinkSocket, cards []netlink.Link) {
	defer kernel.Close()
	for {
		messages, _, err := kernel.Receive()
		switch err {
		case nil:
		case unix.ENOBUFS, unix.EINTR:
			continue // messages were lost; routers repeat everything
		default:
			n.say("IPv6 routers are not heard any more: %v", err)
			return
		}
		for _, m := range messages {
			for _, e := range eventsOf(m) {
				i := slices.IndexFunc(cards,
					func(c netlink.Link) bool { return c.Attrs().Index == e.card })
				if i < 0 {
					continue
				}
				if e.address != nil {
					n.reachable(e.address)
					continue
				}
				n.hear(cards[i].Attrs().Name, e, time.Now())
			}
		}
	}
}

// routers are the recommendations of IPv6 routers.
type routers struct{ servers, search []recommended }

type recommended struct {
	text  string
	until time.Time
}

// hear records a recommendation of a router. The kernel passes on each option of an advertisement
// by itself, so an option is added to earlier ones, as in RFC 8106 6.1.
func (n *network) hear(card string, e event, now time.Time) {
	was := newResolver(card, e.dns, e.search)
	n.mu.Lock()
	r := n.heard[card]
	r.servers = refresh(r.servers, was.servers, now, e.lifetime)
	r.search = refresh(r.search, was.search, now, e.lifetime)
	n.heard[card] = r
	n.mu.Unlock()
	n.resolve(card+" IPv6", resolver{servers: texts(r.servers), search: texts(r.search)})
}

// maxRecommended limits the kept recommendations: more are not used, and a router must not fill the
// memory.
const maxRecommended = 8

// refresh returns the list without expired entries, and with the present recommendation of texts.
// Known texts keep their places. A lifetime of 0 removes texts.
func refresh(list []recommended, texts []string, now time.Time,
	lifetime time.Duration) (fresh []recommended) {
	for _, r := range list {
		if slices.Contains(texts, r.text) {
			r.until = now.Add(lifetime)
		}
		if r.until.After(now) {
			fresh = append(fresh, r)
		}
	}
	for _, text := range texts {
		known := slices.ContainsFunc(fresh, func(r recommended) bool { return r.text == text })
		if !known && lifetime > 0 && len(fresh) < maxRecommended {
			fresh = append(fresh, recommended{text, now.Add(lifetime)})
		}
	}
	return fresh
}

func texts(list []recommended) (texts []string) {
	for _, r := range list {
		texts = append(texts, r.text)
	}
	return texts
}
