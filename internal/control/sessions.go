package control

import (
	"fmt"
	"net/http"

	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// Sessions are the methods of a front end that list and end its sessions.
type Sessions interface {
	Sessions() []status.Session
	EndSessions(which func(status.Session) bool) []status.Session
}

// sessionControl answers the requests about sessions.
type sessionControl struct {
	target Sessions
	log    *zap.Logger
}

func (c *sessionControl) list(w http.ResponseWriter, _ *http.Request, _ uint32) {
	answer(w, http.StatusOK, status.SessionsAnswer{Sessions: c.target.Sessions()})
}

func (c *sessionControl) kick(w http.ResponseWriter, r *http.Request, user uint32) {
	var req status.Kick
	if !understand(w, r, &req) {
		return
	}
	if (req.Initiator == "") == (req.Session == 0) {
		answer(w, http.StatusBadRequest, status.Refusal{Error: "name an initiator or a session"})
		return
	}
	name := serving.NormalName(req.Initiator)
	ended := c.target.EndSessions(func(s status.Session) bool {
		if name == "" {
			return s.TSIH == req.Session
		}
		return serving.NormalName(s.Initiator) == name
	})
	if len(ended) == 0 {
		answer(w, http.StatusConflict, status.Refusal{Error: unknown(req)})
		return
	}
	for _, s := range ended {
		c.log.Info("an operator ended a session", zap.String("initiator", s.Initiator),
			zap.String("remote", s.Remote), zap.Uint16("tsih", s.TSIH), zap.Uint32("by_user", user))
	}
	answer(w, http.StatusOK, status.KickAnswer{Ended: ended})
}

// unknown says that no session matches.
func unknown(k status.Kick) string {
	what := fmt.Sprintf("session %d", k.Session)
	if k.Initiator != "" {
		what = fmt.Sprintf("session of %q", k.Initiator)
	}
	return "there is no " + what + "; the command sessions lists the sessions"
}
